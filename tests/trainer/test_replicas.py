"""Data-parallel replicas that hold different weights: the rank that errs is named, and nothing of it is saved."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionrl.plan.layout import TrainerLayout
from tests.trainer.local_ranks import LocalRanks
from tests.trainer.trainer_worker import Failed, Samples, config_of

EACH_STEP = {"check_weight_hash_across_dp_replicas_interval": 1}


def flip_bit(actor: Any, rank: int, part: str, bit: int = 0) -> None:
    """Flip one bit of one weight, as memory that errs does, in one rank alone."""
    if actor.rank != rank:
        return
    params = {name: param for chunk in actor.trained.chunks for name, param in chunk.named_parameters()}
    param = next(param for name, param in params.items() if part in name)
    param.data.view(torch.int32).reshape(-1)[3] ^= 1 << bit


@pytest.mark.parametrize(
    ("layout", "family", "part", "message"),
    [
        (
            TrainerLayout(2),
            "llama",
            "fc1",
            r"replicas differ \(decoder\.layers\.0\..*fc1.*\), of trainer rank 0 on \S+, ",
        ),
        (TrainerLayout(3), "llama", "fc2", r"trainer rank 1 on \S+: its weights \(.*fc2.*\) are not .*, ranks 0, 2\."),
        (TrainerLayout(2, cp=2), "llama", "norm", r"replicas differ .* rank 0 .* rank 1"),
        (TrainerLayout(2), "qwen3_moe", "experts", r"replicas differ \(\S*experts\S*\), of .* rank 0 .* rank 1"),
        # Tensor-parallel ranks: they have replicas of whole experts alone.
        (TrainerLayout(2, tp=2), "qwen3_moe", "experts", r"replicas differ \(\S*experts\S*\), of .* rank 0 .* rank 1"),
    ],
    ids=str,
)
def test_a_flipped_bit_ends_the_step_and_is_in_no_checkpoint(
    layout: TrainerLayout, family: str, part: str, message: str, workers: LocalRanks, hf: Any, tmp_path: Path
) -> None:
    """Every rank raises, also one without the error. The checkpoint before stays whole."""
    path = tmp_path / "checkpoint"
    workers.start(config_of(hf(family, True)[0], **EACH_STEP), layout)
    shards = Samples(6).shards(layout.dp)
    workers.train(shards)
    workers.call("save", str(path), 0)
    workers.run(flip_bit, 1, part)
    with pytest.raises(Failed, match=message) as failure:
        workers.train(shards, rollout_id=1)
    assert failure.value.kind == "ReplicaMismatch"
    assert "before an optimizer step, which was not taken" in failure.value.message

    workers.start(config_of(hf(family, True)[0], **EACH_STEP), layout)
    assert workers.call("load", str(path))[0]["rollout_id"] == 0
    workers.train(shards, rollout_id=1)  # with the weights of the checkpoint all ranks agree
    workers.run(flip_bit, 1, part, 31)
    with pytest.raises(Failed, match=rf"{message}.*before a checkpoint, which was not written"):
        workers.call("save", str(path), 1)
    assert os.listdir(tmp_path) == ["checkpoint"]
    workers.start(config_of(hf(family, True)[0]), layout)
    assert workers.call("load", str(path))[0]["rollout_id"] == 0


def test_it_compares_as_often_as_it_is_told(workers: LocalRanks, hf: Any) -> None:
    """With 2 not before the first optimizer step, after which every rank has the weights of its owner again."""
    workers.start(config_of(hf("llama", True)[0], check_weight_hash_across_dp_replicas_interval=2), TrainerLayout(2))
    shards = Samples(6).shards(2)
    for rollout_id in range(2):
        workers.run(flip_bit, 0, "input_layernorm")
        if rollout_id == 0:
            workers.train(shards)
    with pytest.raises(Failed, match="replicas differ"):
        workers.train(shards, rollout_id=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [64, 63])
def test_one_bit_shows(dtype: torch.dtype, size: int) -> None:
    from fusionrl.cpu import megatron_patches

    megatron_patches.install()
    from fusionrl.trainer.replicas import checksum

    tensor = torch.arange(size).to(dtype)
    known = {int(checksum(tensor))}
    data = tensor.view(torch.uint8)
    for place in range(data.numel()):
        for bit in range(8):
            data[place] ^= 1 << bit
            known.add(int(checksum(tensor)))
            data[place] ^= 1 << bit
    assert int(checksum(tensor)) in known and len(known) > 8 * dtype.itemsize  # bits of equal words may look alike
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone())  # wherever it lies


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([(0, 5), (1, 6), (0, 5), (1, 6)], []),
        ([(0, 5), (1, 6), (0, 5), (1, 7)], [([1, 3], [1, 3])]),
        ([(0, 5), (0, 5), (0, 4), (0, 5)], [([2], [0, 1, 2, 3])]),
        ([(0, 5), (0, 5), (0, 4), (0, 4)], [([0, 1, 2, 3], [0, 1, 2, 3])]),
        ([(0, 1), (1, 1), (0, 2), (1, 1), (0, 1), (1, 3)], [([2], [0, 2, 4]), ([5], [1, 3, 5])]),
    ],
)
def test_who_is_suspected(rows: list[tuple[int, int]], found: list[tuple[list[int], list[int]]]) -> None:
    from fusionrl.cpu import megatron_patches

    megatron_patches.install()
    from fusionrl.trainer.replicas import disagreeing

    assert disagreeing(rows) == found
