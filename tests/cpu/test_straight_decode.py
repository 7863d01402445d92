"""Decode steps by the straight line and by SGLang's layers, in SGLang's own runner: equal bit by bit."""

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
    "qwen3, norms of heads": ("qwen3", "float32", {}),
    "qwen2 in bf16, biases": ("qwen2", "bfloat16", {}),
    "llama, pages": ("llama", "float32", {"page_size": 16}),
}
ELSEWHERE = [
    *("enable_lora", "speculative_algorithm", "rl_on_policy_target", "enable_torch_compile"),
    *("debug_tensor_dump_output_folder", "forward_hooks", "several ranks", "torch_native", "SimpleNamespace"),
    "somebody watches its layers",
]


@pytest.fixture(scope="module")
def compared(
    hf: Callable[..., tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What `straight_process` says of each case."""
    orders = [(str(hf(family, False)[0]), dtype, values) for family, dtype, values in PLAIN.values()]
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
    return dict(zip(PLAIN, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_model_takes_the_line_and_gives_the_same(name: str, compared: dict[str, dict[str, Any]]) -> None:
    """Also after other weights were put into its modules. Other engines and models are left to SGLang."""
    elsewhere = compared[name].pop("elsewhere")
    assert compared[name] == {
        "told": ["Decode steps: a straight line of kernels"],
        "num_of_prompts": 0,
        "num_attended": STEPS * 2,  # layers
        "unequal": 0,
        "also_takes": ["a decode step"],
    }
    for text, reason in zip(elsewhere, ELSEWHERE, strict=True):
        assert text.startswith("Decode steps: by SGLang's layers (") and reason in text
