"""The stream's thread: whoever waits for it hears of its end."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fusionrl.buffer.stream_thread import LoopThread


class Collector(LoopThread):
    """Dies when it is told, while somebody waits for an answer that it owes."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.owed: Future[int] = Future()

    async def _main(self, started: Future[None]) -> None:
        started.set_result(None)
        await self._wake.wait()
        if self.error is not None:
            raise self.error

    def ask(self) -> int:
        self._post(lambda: None, self.owed)
        return self.owed.result(10)

    def die(self, error: BaseException) -> None:
        self.error = error
        self._loop.call_soon_threadsafe(self._wake.set)


def test_nobody_waits_for_a_thread_that_has_died() -> None:
    """NeMo-RL#3488: a collector was dead for hours, and the trainers waited."""
    collector = Collector()
    collector.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collector.ask)
        while not collector._asked:
            time.sleep(0.001)
        collector.die(ValueError("no such tool"))
        with pytest.raises(ValueError, match="no such tool"):
            waiting.result(10)
    with pytest.raises(ValueError, match="no such tool"):  # and whoever comes later
        collector._call(lambda: 1)
    collector.stop()


def test_one_that_was_stopped_says_so() -> None:
    collector = Collector()
    collector.start()
    assert collector._call(lambda: 1) == 1
    collector.stop()
    with pytest.raises(RuntimeError, match="the stream has ended"):
        collector._call(lambda: 1)
