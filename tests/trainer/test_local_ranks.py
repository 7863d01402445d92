"""The pool of ranks that tests share."""

import os
import signal
from typing import Any

import pytest

from fusionrl.plan.layout import TrainerLayout
from tests.trainer.local_ranks import Failed, LocalRanks
from tests.trainer.trainer_worker import config_of


def _rank_0_dies(actor: Any) -> None:
    if actor.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


class _Unreadable:
    """As a function whose module cannot be imported."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("none",)


def test_a_rank_outlives_what_it_cannot_read(workers: LocalRanks, hf: Any) -> None:
    workers.start(config_of(hf("llama", True)[0]), TrainerLayout(2, tp=2))
    with pytest.raises(Failed, match="ValueError: invalid literal"):
        workers.run(_rank_0_dies, _Unreadable())
    assert len(workers.start(config_of(hf("llama", True)[0]), TrainerLayout(2, tp=2))) == 2


def test_a_rank_that_dies_fails_one_test_alone(workers: LocalRanks, hf: Any) -> None:
    config = config_of(hf("llama", True)[0])
    for layout in (TrainerLayout(2, tp=2), TrainerLayout(1)):
        workers.start(config, layout)
        with pytest.raises((EOFError, ConnectionError)) as died:
            workers.run(_rank_0_dies)
        (note,) = died.value.__notes__
        assert f": [{-signal.SIGKILL}" in note
        assert len(workers.start(config, layout)) == layout.world_size
