"""Limits of time, on machines of any speed."""

import time

_LOOP_S = 0.03  # of the loop below on the machines that limits were set on


def here_s(limit_s: float) -> float:
    """Return a limit for this machine as fast as it is now: longer where it is slower, and never shorter."""
    start = time.perf_counter()
    for _ in range(1_000_000):
        pass
    return limit_s * max(1.0, (time.perf_counter() - start) / _LOOP_S)
