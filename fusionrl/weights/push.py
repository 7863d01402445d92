"""The protocol of a weight push, run by the driver: prepare, pause, begin, transfer, end, continue.

The engines generate nothing from pause to continue. After any failure they are released.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from fusionrl.observe.spans import span
from fusionrl.plan.push import EngineTarget, Feed
from fusionrl.weights.rank_reports import SendReport
from fusionrl.weights.remote_calls import future_of, wait_all

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 30.0


def push_weights(
    trainers: Sequence[ActorHandle],
    targets: Sequence[EngineTarget],
    feeds: Sequence[Feed],
    *,
    version: int,
    transport: str,
    pause_mode: str,
    timeout_s: float,
) -> dict[str, float]:
    """Bring every engine to the trainers' weights, stamped with `version`. Returns perf/… and sync/… metrics:

    sync/prepare_s   plan, groups, buffers and the first gathers, while the engines still generate
    sync/pause_s     time from the first engine pausing until all have resumed
    sync/transfer_s  part of it: from the first byte sent to the last answer
    sync/bytes       of the weights, each counted once
    sync/calls       requests to engines that carried weights
    sync/gb_per_s    1e9 bytes that all engines together received a second of the transfer

    Raises:
        RuntimeError: an engine or a trainer failed, or `timeout_s` seconds passed; names it. The engines
        resume with the weights they hold, so that they can be pushed to again or shut down.
    """
    start = time.perf_counter()

    def left() -> float:
        return max(1.0, timeout_s - (time.perf_counter() - start))

    def of_trainers(method: str, *args: object) -> list[tuple[str, ObjectRef]]:
        return [(f"trainer {rank}", getattr(t, method).remote(*args)) for rank, t in enumerate(trainers)]

    def ask_engines(method: str, *args: object) -> None:
        calls = [(f"engine {t.index}: {method}", getattr(t.handle, method).remote(*args)) for t in targets]
        wait_all(calls, left())

    with span("prepare"):
        wait_all(of_trainers("prepare_push", list(targets), transport), left())
    prepared = time.perf_counter()
    not_released: list[str] = []
    try:
        with span("pause engines"):
            paused = pause_engines(targets, pause_mode, left())
        try:
            ask_engines("begin_weight_update")
            calls = of_trainers("push_weights", list(targets), list(feeds), version, transport)
            with span("transfer"):
                sent: list[SendReport] = wait_all(calls, left())
        finally:
            not_released += _release(targets, "end_weight_update")
    finally:
        not_released += _release(targets, "resume")
    if not_released:
        raise RuntimeError("weight push: " + "; ".join(not_released))
    end = time.perf_counter()
    return {
        "perf/time_sync_s": end - start,
        "sync/prepare_s": prepared - start,
        "sync/pause_s": end - paused,
        "sync/version": float(version),
        **_totals(sent, len(targets)),
    }


def _totals(sent: Sequence[SendReport], num_engines: int) -> dict[str, float]:
    """Sums over the trainers' reports; of the clocks, which are one machine's or nearly so, the ends."""
    num_bytes = float(sum(report["bytes"] for report in sent))
    ends = [report for report in sent if "last_s" in report]
    seconds = max(report["last_s"] for report in ends) - min(report["first_s"] for report in ends)
    return {
        "sync/transfer_s": seconds,
        "sync/bytes": num_bytes,
        "sync/buckets": float(sum(report["buckets"] for report in sent)),
        "sync/calls": float(sum(report["calls"] for report in sent)),
        "sync/gb_per_s": num_bytes * num_engines / seconds / 1e9,
    }


def _release(targets: Sequence[EngineTarget], method: str) -> list[str]:
    """Call `method` on every engine, whatever its state; return the failures."""
    calls = [(f"engine {target.index}: {method}", getattr(target.handle, method).remote()) for target in targets]
    return [failure for name, call in calls if (failure := call_failure(name, call, RELEASE_TIMEOUT_S))]


def call_failure(name: str, call: Future[object] | ObjectRef, timeout_s: float) -> str | None:
    """Wait for one call; log and return its failure, or None. Where an error broke the push, that one is raised."""
    try:
        wait_all([(name, call)], timeout_s)
    except RuntimeError as error:
        logger.warning("weight push: %s", error)
        return str(error)
    return None


def pause_engines(targets: Sequence[EngineTarget], mode: str, timeout_s: float) -> float:
    """Pause all; return when the first of them paused, by `time.perf_counter`.

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
