"""`Beside`: evaluations on engines of their own (--eval-num-gpus), while training and generation go on."""

from __future__ import annotations

import time
from typing import Protocol

from fusionrl.cluster.buffer_handle import Started
from fusionrl.driver.reporter import Reporter


class Evaluator(Protocol):
    """The part of `BufferHandle` that is used here."""

    def start_evaluation(self, step: int, version: int | None) -> Started:
        """Begin an evaluation."""

    def wait_evaluation(self, started: Started) -> dict[str, float]:
        """Wait for its metrics."""

    def is_done(self, started: Started) -> bool:
        """Return whether the wait would end at once."""


class Beside:
    """One evaluation at a time. Its numbers are recorded under the step at which it was begun."""

    def __init__(self, buffer: Evaluator, reporter: Reporter) -> None:
        self._buffer, self._reporter = buffer, reporter
        self._started: Started | None = None
        self.step: int | None = None
        """The step of the evaluation that is under way; None: none is."""

    def begin(self, step: int, version: int) -> None:
        """Begin the evaluation of weights of `version`, which its engines have, and return."""
        assert self.step is None, f"the evaluation after step {self.step} is under way"
        self._started, self.step = self._buffer.start_evaluation(step, version), step

    def collect(self) -> None:
        """Record the results of the evaluation under way, if it has ended. Does not wait."""
        if self._started is not None and self._buffer.is_done(self._started):
            self.finish()

    def finish(self) -> float:
        """Wait for the evaluation under way, if any, and record its results. Returns the seconds that were waited."""
        if self._started is None or self.step is None:
            return 0.0
        start = time.perf_counter()
        if not self._buffer.is_done(self._started):
            self._reporter.status(f"waiting for the evaluation after step {self.step}")
        values = self._buffer.wait_evaluation(self._started)  # a stop may end the wait: it is still under way then
        self._reporter.record_evaluation(self.step, values)
        self._started = self.step = None
        return time.perf_counter() - start
