"""Threads of a worker that is a fork; how a raylet starts workers is tested in `test_supervisor.py`, by its own."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ("4,2", 4), ("", None), ("many", None), ("0", None), (" 08", 8)]
)
def test_threads_of_a_fork(text: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenMP takes for no number changes nothing, and ends no worker."""
    import torch

    from fusionrl.runtime.worker_fork import _limit_threads

    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    _limit_threads(text)
    assert found == ([] if expected is None else [expected])
