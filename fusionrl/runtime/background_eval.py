"""`BackgroundEval`: evaluations on engines of their own (--eval-num-gpus), while training and generation go on.

With --use-fault-tolerance an evaluation whose engines died has failed: `eval/failed` stands in the place of its result.
Its weights are gone, as the trainers have learned meanwhile; after the last step alone they are still there, and the
evaluation is made again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from fusionrl.runtime.buffer_handle import EvaluationLost, PendingRound
from fusionrl.runtime.reporter import Reporter

logger = logging.getLogger(__name__)

_MOST_TRIES = 3


class Evaluator(Protocol):
    """The part of `BufferHandle` that is used here."""

    def start_evaluation(self, step: int, version: int | None) -> PendingRound:
        """Begin an evaluation."""

    def wait_evaluation(self, started: PendingRound) -> dict[str, float]:
        """Wait for its metrics."""

    def is_done(self, started: PendingRound) -> bool:
        """Return whether the wait would end at once."""


class BackgroundEval:
    """One evaluation at a time. Its numbers are recorded under the step at which it was begun."""

    def __init__(
        self, buffer: Evaluator, reporter: Reporter, push_again: Callable[[int], int | None] = lambda step: None
    ) -> None:
        """`push_again(step)` brings the weights after a step to the engines once more, where they are still there, and
        returns their version; None where they are not."""
        self._buffer, self._reporter, self._push_again = buffer, reporter, push_again
        self._started: PendingRound | None = None
        self.step: int | None = None
        """The step of the evaluation that is under way; None: none is."""

    def begin(self, step: int, version: int) -> None:
        """Begin the evaluation of weights of `version`, which its engines have, and return."""
        assert self.step is None, f"the evaluation after step {self.step} is under way"
        self._started, self.step = self._buffer.start_evaluation(step, version), step

    def collect(self) -> None:
        """Record the results of the evaluation under way, if it has ended. Does not wait."""
        if self._started is not None and self._buffer.is_done(self._started):
            self._wait(num_tries=_MOST_TRIES)

    def finish(self) -> float:
        """Wait for the evaluation under way, if any, and record its results. Returns the seconds that were waited."""
        start, num_tries = time.perf_counter(), 1
        while self._started is not None:
            if not self._buffer.is_done(self._started):
                self._reporter.status(f"waiting for the evaluation after step {self.step}")
            self._wait(num_tries)  # a stop may end the wait: it is still under way then
            num_tries += 1
        return time.perf_counter() - start

    def _wait(self, num_tries: int) -> None:
        """Wait for the evaluation under way; afterwards it is recorded, or begun anew."""
        assert self._started is not None and self.step is not None
        step = self.step
        try:
            values = self._buffer.wait_evaluation(self._started)
        except EvaluationLost as error:
            self._started = self.step = None
            version = self._push_again(step) if num_tries < _MOST_TRIES else None
            if version is not None:
                logger.warning("the evaluation after step %d is made again: %s", step, error)
                self.begin(step, version)
                return
            logger.warning("the evaluation after step %d has failed, and the run goes on: %s", step, error)
            values = {"eval/failed": 1.0, "eval/engines_died": float(error.num_died)}
        self._reporter.record_evaluation(step, values)
        self._started = self.step = None
