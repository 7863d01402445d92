"""The wing `compat` is imported only for a flag, a file or a function that comes from slime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.compat.slime.flags.translate import translate
from fusionrl.config.slime_flags import translate_slime_flags

CODE = """
import sys
import fusionrl.cli.train, fusionrl.runtime.loops
from fusionrl.checks.warnings import run_warnings
from fusionrl.cli.resolve import resolve

run_warnings(*resolve(sys.argv[1:]))
print(*(name for name in sys.modules if name.startswith("fusionrl.compat.")))
"""
PLAIN = [
    *("--rollout-batch-size", "4", "--lr", "1e-5", "--num-rollout", "2", "--no-save", "--colocate"),
    *("--rollout-max-response-len", "8", "--offload-train", "auto", "--update-weight-transport", "auto"),
    "--sglang-mem-fraction-static=0.5",
]


@pytest.mark.parametrize(
    ("imports", "flags", "has_wing"),
    [
        ("json", PLAIN, False),
        ("json", [*PLAIN, "--offload-train"], True),
        ("json", [*PLAIN, "--wandb-project", "p"], True),
        ("slime.utils.types", PLAIN, True),
        ("miles.utils.types", PLAIN, True),
    ],
)
def test_only_slime_users_import_the_wing(
    tmp_path: Path, tiny_model: Path, imports: str, flags: list[str], has_wing: bool
) -> None:
    hook, rows = tmp_path / "reward.py", tmp_path / "rows.jsonl"
    hook.write_text(f"import {imports}\n\nasync def rm(args, sample, **kw):\n    return 1.0\n")
    rows.write_text('{"input": "2+2", "label": "4"}\n' * 4)
    paths = ["--custom-rm-path", f"{hook}:rm", "--hf-checkpoint", str(tiny_model), "--prompt-data", str(rows)]
    done = subprocess.run([sys.executable, "-c", CODE, *paths, *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout.strip()) is has_wing, done.stdout


@pytest.mark.parametrize(
    "flags",
    [
        *(["--offload-train"], ["--no-offload-train"], ["--update-weight-transport", "nccl"]),
        *(["--log-probs-chunk-size=-1"], ["--micro-batch-size", "2", "--use-dynamic-batch-size"]),
        *(["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"], ["--sglang-dtype", "bfloat16"]),
        *(["--rollout-num-gpus-per-engine", "2", "--sglang-tp-size", "2"], ["--sglang-enable-ep-moe"], ["--bf16"]),
        *(["--sglang-enable-dp-attention", "--sglang-dp-size", "8"], ["--sglang-router-port", "3000"]),
        *(["--sglang-disable-piecewise-cuda-graph"], ["--lr", "1e-6", "--offload-train", "auto"]),
    ],
)
def test_the_door_lets_every_translated_flag_through(flags: list[str]) -> None:
    assert translate_slime_flags([*PLAIN, *flags]) == translate([*PLAIN, *flags])
