"""The wing `compat` is imported only for a flag, a file or a function that comes from slime."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.compat.slime.translate import translate
from fusionrl.config.passed_flags import translate_slime_flags

CODE = """
import json, sys
import fusionrl.cli.train, fusionrl.runtime.loops
from fusionrl.checks.validate import run_warnings
from fusionrl.cli.resolve import resolve

for argv in json.loads(sys.argv[1]):
    run_warnings(*resolve(argv))
    print(any(name.startswith("fusionrl.compat.") for name in sys.modules))
"""
PLAIN = [
    *("--rollout-batch-size", "4", "--lr", "1e-5", "--num-rollout", "2", "--no-save", "--colocate"),
    *("--rollout-max-response-len", "8", "--offload-train", "auto", "--update-weight-transport", "auto"),
    "--sglang-mem-fraction-static=0.5",
]


def test_only_slime_users_import_the_wing(tmp_path: Path, tiny_model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "2+2", "label": "4"}\n' * 4)
    commands = []
    for module in ("json", "slime.utils.types"):
        hook = tmp_path / f"rewards_by_{module.partition('.')[0]}.py"
        hook.write_text(f"import {module}\n\nasync def rm(args, sample, **kw):\n    return 1.0\n")
        paths = ["--custom-rm-path", f"{hook}:rm", "--hf-checkpoint", str(tiny_model), "--prompt-data", str(rows)]
        commands.append([*paths, *PLAIN])
    argv = [sys.executable, "-c", CODE, json.dumps(commands)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["False", "True"], done.stderr


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
