"""From when on engines stand still: not while they end what they compute."""

import threading
import time

import pytest

from fusionrl.plan.push_plan import EngineTarget
from fusionrl.weights.push import Push
from tools.threaded import Threaded


class Engine:
    """Pauses once its forward pass is at its end, which may not come (None: it cannot pause)."""

    def __init__(self, end_of_pass: threading.Event | None) -> None:
        self.end_of_pass = end_of_pass

    def pause(self, mode: str) -> None:
        assert mode == "retract"
        if self.end_of_pass is None:
            raise RuntimeError("no such mode")
        self.end_of_pass.wait(60.0)


def pause(limit_s: float, *ends: threading.Event | None) -> float:
    targets = [EngineTarget(i, Threaded(Engine(end)), "host", (i,)) for i, end in enumerate(ends)]
    return Push([], targets, 0, limit_s).pause("retract")


def test_the_pause_begins_with_the_first_engine_that_stands_still() -> None:
    first, second = threading.Event(), threading.Event()
    times = list[float]()

    def end_passes() -> None:
        """Of the second engine, and of the first when the second has paused for a while."""
        for event in (second, first):
            time.sleep(0.3)
            times.append(time.perf_counter())
            event.set()

    ending = threading.Thread(target=end_passes)
    ending.start()
    still = pause(60.0, first, second)
    ending.join()
    assert times[0] <= still < times[1]


def test_an_engine_that_does_not_pause_is_named() -> None:
    ended, never = threading.Event(), threading.Event()
    ended.set()
    with pytest.raises(RuntimeError, match=r"engine 1: pause: no such mode"):
        pause(60.0, ended, None)
    with pytest.raises(RuntimeError, match=r"engine 0: pause: no end after 1 s"):
        pause(0.1, never)
    never.set()  # its thread ends
