"""Decode steps by the straight line and by SGLang's layers, in SGLang's own runner: equal bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.straight_process import STEPS

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {
    "qwen3": ("qwen3", "float32", {}),
    "qwen3 in bf16": ("qwen3", "bfloat16", {}),
    "qwen2, biases": ("qwen2", "float32", {}),
    "llama, pages": ("llama", "float32", {"page_size": 16}),
}
OTHERS = {
    "experts": (("qwen3_moe", "float32", {}), "Qwen3MoeModel"),
    "layers that are written": (
        ("llama", "float32", {"debug_tensor_dump_output_folder": "dumps"}),
        "debug_tensor_dump",
    ),
    "hooks": (("llama", "float32", {"forward_hooks": [{"name": "no", "target_modules": []}]}), "forward_hooks"),
    "another backend": (("llama", "float32", {"decode_attention_backend": "torch_native"}), "torch_native"),
}


@pytest.fixture(scope="module")
def compared(
    hf: Callable[..., tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What `straight_process` says of each case."""
    cases = PLAIN | {name: case for name, (case, _) in OTHERS.items()}
    orders = [(str(hf(family, False)[0]), dtype, values) for family, dtype, values in cases.values()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cpu.straight_process"],
        input=json.dumps(orders),
        env={**os.environ, "FUSIONRL_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path_factory.mktemp("straight"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(cases, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_model_takes_the_line_and_gives_the_same(name: str, compared: dict[str, dict[str, Any]]) -> None:
    """Also after other weights were put into its modules."""
    assert compared[name] == {
        "installed": True,
        "told": ["Decode steps: a straight line of kernels"],
        "num_of_prompts": 0,
        "num_attended": STEPS * 2,  # layers
        "unequal": 0,
        "also_takes": ["a decode step"],
        "with_a_hook": [False, "Decode steps: by SGLang's layers (somebody watches its layers)"],
    }


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_sglang(name: str, compared: dict[str, dict[str, Any]]) -> None:
    found, reason = compared[name], OTHERS[name][1]
    assert not found["installed"] and len(found["told"]) == 1
    assert found["told"][0].startswith("Decode steps: by SGLang's layers (") and reason in found["told"][0]
