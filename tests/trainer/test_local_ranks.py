"""Processes of ranks: what starting one costs, and what it has of its starter."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.trainer.local_ranks import LocalRanks


def state(actor: object) -> tuple[float, str | None]:
    """Seconds of a core so far, and a variable of the environment."""
    return time.process_time(), os.environ.get("FUSIONRL_TEST_VARIABLE")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
@pytest.mark.parametrize("value", ["first", "second"])
def test_a_rank_imports_nothing_and_has_the_environment_of_now(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONRL_TEST_VARIABLE", value)
    ranks = LocalRanks(1)
    try:
        ranks.world_size = 1  # without a trainer
        ((seconds, found),) = ranks.run(state)
    finally:
        ranks.close()
    assert found == value
    assert seconds < 1.0, "the import of Megatron takes 3"
