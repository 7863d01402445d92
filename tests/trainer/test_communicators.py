"""Process groups of two kinds: NCCL's give their buffers away, gloo's refuse, and take part in neither call."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.communicators import Communicators, backends_of_groups
from tests.trainer.trainer_worker import config_of


class Nccl:
    """NCCL's backend, which no CPU has: as torch's, it may be suspended once, and resumed only when it is suspended."""

    def __init__(self, is_able: bool = True) -> None:
        self.is_able, self.is_suspended, self.num_turns = is_able, False, 0

    def name(self) -> str:
        return "nccl"

    def suspend(self) -> None:
        if not self.is_able:
            raise RuntimeError("NCCL 2.28 has no ncclCommSuspend")
        assert not self.is_suspended
        self.is_suspended = True

    def resume(self) -> None:
        assert self.is_suspended
        self.is_suspended, self.num_turns = False, self.num_turns + 1


class OldNccl:
    """That of a torch before 2.13."""

    def name(self) -> str:
        return "nccl"


@pytest.fixture
def gloo() -> dist.ProcessGroupGloo:
    """A real backend, which refuses both calls."""
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    for verb in ("suspend", "resume"):
        with pytest.raises(RuntimeError, match=f"does not support {verb}"):
            getattr(backend, verb)()
    return backend


def test_the_object_group_is_left_alone(gloo):
    """A colocated run has NCCL's groups of Megatron and a gloo group for objects; it ended at its first reload."""
    first, second = Nccl(), Nccl()
    communicators = Communicators()
    for turn in (1, 2):
        communicators.suspend([first, gloo, second])
        communicators.suspend([first, gloo, second])  # they are away already
        assert first.is_suspended and second.is_suspended and len(communicators) == 2
        communicators.resume()
        communicators.resume()
        assert (first.num_turns, second.num_turns, len(communicators)) == (turn, turn, 0)


@pytest.mark.parametrize("unable", [OldNccl(), Nccl(is_able=False)])
def test_versions_that_cannot(gloo, unable, caplog):
    communicators = Communicators()
    with caplog.at_level(logging.INFO):
        communicators.suspend([gloo, unable])
    assert "process groups keep their buffers" in caplog.text
    communicators.resume()


def kinds(actor) -> list[str]:
    """The backends that a rank's groups have for a GPU."""
    return [backend.name() for backend in backends_of_groups(torch.device("cuda"))]


def test_groups_of_a_rank(workers, hf):
    """On a CPU all of Megatron's groups are gloo's, which answers for a GPU, too."""
    folder, _ = hf("qwen3", False)
    workers.start(config_of(folder), TrainerLayout(2))
    for found in workers.run(kinds):
        assert set(found) == {"gloo"} and len(found) > 3
