"""A choice of tools/memory_check.py: the estimate against Megatron's own buffers and autograd's own tensors."""

import json
from typing import Any

import pytest

from tests.trainer.forked_program import ForkedProgram
from tools import memory_check

Rows = dict[str, list[dict[str, Any]]]
STATES = {"qwen3_moe TP 2 EP 2 ETP 1": [4], "qwen3 tied PP 2 VPP 2": [2], "deepseek_v3 TP 2 PP 2 CP 2 EP 2": [8]}
STATES |= {"qwen3_5 frozen, bf16": [1], "qwen3_next TP 2": [2], "qwen3_vl TP 2 PP 2": [4]}
STATES |= {"qwen3_moe lora TP 2 EP 2 ETP 2": [4], "deepseek_v3 lora of latents one rank, bf16": [1]}
ACTIVATIONS = [
    *(f"qwen3: attention with q/k norms, MLP{kind}" for kind in (" core_attn", " full", ", long none")),
    *(f"qwen2_moe: with a shared expert {recompute}" for recompute in ("none", "moe")),
    "glm4: output norms mlp",
    "qwen3_moe: mixture of experts, lora 16 none",
    "qwen3_moe: mixture of experts, EP 2, lora 16 none",
    *(f"qwen3_5_text: {kind}" for kind in ("a gated delta net none", "gated attention none")),
    "short_conv: a kind of a plug-in none",
    *(
        f"{kind}: vision tower {recompute}"
        for kind in ("qwen2_5_vl", "qwen3_vl", "kimi_vl")
        for recompute in ("none", "blocks")
    ),
    *(f"deepseek_v3: latent attention, {kind}" for kind in ("mixture none", "MLP, long mla_up_proj")),
]


@pytest.fixture(scope="module")
def found(forkserver: None, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The rows of both choices, from one process that has Megatron already, as a trainer's has."""
    folder = tmp_path_factory.mktemp("memory")
    file = folder / "found.json"
    words = [str(memory_check.__file__), "--states", "--activations", "--only", *STATES, *ACTIVATIONS]
    done = ForkedProgram([*words, "--json", str(file)], folder).wait(300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = json.loads(file.read_text())
    assert all(row["holds"] for row in (*rows["states"], *rows["activations"]))
    return dict(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("only", "num_ranks"), STATES.items())
def test_parameters_buffers_and_optimizer_are_megatrons(found: Rows, only: str, num_ranks: list[int]) -> None:
    rows = [row for row in found["states"] if only in f"{row['model']} {row['layout']}"]
    assert [row["ranks"] for row in rows] == num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("only", ACTIVATIONS)
def test_kept_tensors_are_autograds(found: Rows, only: str) -> None:
    (row, *others) = [row for row in found["activations"] if only in f"{row['layer']} {row['recompute']}"]
    bound = memory_check.TOWER_BOUND if "tower" in only else 0.02
    assert abs(row["difference"]) <= bound and row["measured"] > 1000 and len(others) <= 1


def test_published_peaks_are_within_five_percent() -> None:
    differences = [row["difference"] for row in memory_check.check_published([], lambda row: None)]
    assert len(differences) == 23 and max(map(abs, differences)) < 0.05
