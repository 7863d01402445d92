"""Pausing engines for a push, and from when on they stand still."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from fusionrl.plan.push import EngineTarget
from fusionrl.weights.remote_calls import future_of, wait_all


def pause_engines(targets: Sequence[EngineTarget], mode: str, timeout_s: float) -> float:
    """Pause all; return when the first of them stood still, of `time.perf_counter`.

    An engine that generates ends its forward pass before it pauses: that is work, and no pause.

    Raises:
        RuntimeError: one failed, or did not pause within `timeout_s` seconds; names it.
    """
    still = list[float]()

    def note(_: Future[object]) -> None:
        still.append(time.perf_counter())

    calls = [(f"engine {target.index}: pause", future_of(target.handle.pause.remote(mode))) for target in targets]
    for _, call in calls:
        call.add_done_callback(note)
    wait_all(calls, timeout_s)
    return min(still, default=time.perf_counter())
