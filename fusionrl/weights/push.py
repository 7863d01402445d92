"""The protocol of a weight push, run by the driver: pause, begin, transfer, end, continue.

Whatever fails, the engines are released again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

from fusionrl.weights.plan import EngineTarget, Feed

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 30.0


def push_weights(
    trainers: Sequence[Any],
    targets: Sequence[EngineTarget],
    feeds: Sequence[Feed],
    *,
    version: int,
    transport: str,
    pause_mode: str,
    timeout_s: float,
) -> dict[str, float]:
    """Bring every engine to the trainers' weights, stamped with `version`. Returns sync/… metrics.

    Raises:
        RuntimeError: an engine or a trainer failed; the engines were told to go on (with whatever they hold), so
        that they can be pushed to again or shut down.
    """
    start = time.perf_counter()
    handles = [target.handle for target in targets]
    # What a trainer needs of a target is its actor handle; nothing else is shared.
    try:
        ray.get([handle.pause.remote(pause_mode) for handle in handles], timeout=timeout_s)
        ray.get([handle.begin_weight_update.remote() for handle in handles], timeout=timeout_s)
        try:
            sent = _get_all(
                [t.push_weights.remote(list(targets), list(feeds), version, transport) for t in trainers],
                timeout_s,
            )
        finally:
            _release(handles, "end_weight_update")
    finally:
        _release(handles, "resume")
    seconds = time.perf_counter() - start
    num_bytes = float(sent[0]["bytes"])
    return {
        "perf/time_sync_s": seconds,
        "sync/bytes": num_bytes,
        "sync/buckets": float(sent[0]["buckets"]),
        "sync/gb_per_s": num_bytes * len(targets) / seconds / 1e9,
        "sync/version": float(version),
    }


def _get_all(refs: list[Any], timeout_s: float) -> list[Any]:
    """ray.get that raises as soon as one of `refs` has failed: the others may wait for it for ever."""
    deadline = time.monotonic() + timeout_s
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise RuntimeError(f"weight push: no end after {timeout_s:.0f} s (--update-weight-timeout-s)")
        ray.get(done)
    return ray.get(refs)


def _release(handles: Sequence[Any], method: str) -> None:
    for handle in handles:
        try:
            ray.get(getattr(handle, method).remote(), timeout=_RELEASE_TIMEOUT_S)
        except (ray.exceptions.RayError, RuntimeError) as error:
            # The error that broke the push is on its way up; a dead engine cannot be released.
            logger.warning("weight push: %s of an engine failed: %s", method, error)
