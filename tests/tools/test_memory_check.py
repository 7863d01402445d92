"""A choice of tools/memory_check.py: the estimate against Megatron's own buffers and autograd's own tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.forked_program import ForkedProgram

ROOT = Path(__file__).parents[2]


def check(folder: Path, *flags: str) -> dict[str, list[dict[str, Any]]]:
    """In a process of its own: what it does to torch would stay in this one."""
    file = folder / "found.json"
    argv = [sys.executable, "tools/memory_check.py", *flags, "--json", str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return rows_of(file)


def rows_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """They all hold."""
    found: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
    assert all(row["holds"] for rows in found.values() for row in rows)
    return found


STATES = {"qwen3_moe TP 2 EP 2 ETP 1": [4], "qwen3 tied PP 2 VPP 2": [2], "deepseek_v3 TP 2 PP 2 CP 2 EP 2": [8]}
ACTIVATIONS = [
    "qwen3: attention with q/k norms, MLP none",
    "qwen3: attention with q/k norms, MLP core_attn",
    "qwen3: attention with q/k norms, MLP full",
    "qwen2_moe: with a shared expert none",
    "qwen2_moe: with a shared expert moe",
    "glm4: output norms mlp",
    "deepseek_v3: latent attention, mixture none",
    "deepseek_v3: latent attention, mixture mla_up_proj",
    "qwen3: attention with q/k norms, MLP, long none",
    "deepseek_v3: latent attention, MLP, long mla_up_proj",
]


@pytest.fixture(scope="module")
def found(forkserver: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The rows of both choices, from one process that has Megatron already, as a trainer's has."""
    folder = tmp_path_factory.mktemp("memory")
    file = folder / "found.json"
    words = [str(ROOT / "tools" / "memory_check.py"), "--states", "--activations", "--only", *STATES, *ACTIVATIONS]
    done = ForkedProgram([*words, "--json", str(file)], folder).wait(300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return rows_of(file)


@pytest.mark.slow
@pytest.mark.parametrize(("only", "num_ranks"), STATES.items())
def test_parameters_buffers_and_optimizer_are_megatrons(
    found: dict[str, list[dict[str, Any]]], only: str, num_ranks: list[int]
) -> None:
    rows = [row for row in found["states"] if only in f"{row['model']} {row['layout']}"]
    assert [row["ranks"] for row in rows] == num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("only", ACTIVATIONS)
def test_kept_tensors_are_autograds(found: dict[str, list[dict[str, Any]]], only: str) -> None:
    (row, *others) = [row for row in found["activations"] if only in f"{row['layer']} {row['recompute']}"]
    assert abs(row["difference"]) <= 0.02
    assert row["measured"] > 1000
    assert len(others) <= 1


def test_published_peaks_are_within_five_percent(tmp_path: Path) -> None:
    rows = check(tmp_path, "--published")["published"]
    assert len(rows) == 23
    assert max(abs(row["difference"]) for row in rows) < 0.05
