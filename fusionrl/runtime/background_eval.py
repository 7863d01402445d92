"""`BackgroundEval`: evaluations on engines of their own (--eval-num-gpus), while training and generation go on.

With --use-fault-tolerance an evaluation whose engines died has failed: `eval/failed` stands in the place of its result.
Its weights are gone, as the trainers have learned meanwhile; after the last step alone they are still there, and the
evaluation is made again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fusionrl.observe.metrics import METRICS_FILE, STEP_TIME, read_metrics
from fusionrl.runtime.buffer_handle import EvaluationLost, PendingRound
from fusionrl.runtime.reporter import Reporter

logger = logging.getLogger(__name__)

_MOST_TRIES = 3
_WAS_DUE = "perf/time_wait_eval_s"  # in the row of a step that engines of an evaluation got the weights of


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


class PastEvaluations:
    """What metrics.jsonl and eval/ of a run's earlier attempts say.

    An attempt that was resumed from an earlier checkpoint trains its steps again: other weights, and a result of the
    attempt before is not theirs. The last attempt that trained a step has made the weights that count.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "eval"
        rows = read_metrics(run_dir, of_rows_with=STEP_TIME) if (run_dir / METRICS_FILE).exists() else []
        self._steps = {int(row["step"]): row for row in rows}

    def was_due(self, step: int) -> bool:
        """Return whether the attempt that trained `step` gave engines its weights to evaluate them."""
        return _WAS_DUE in self._steps.get(step, {})

    def last_begun(self, before: int) -> int | None:
        """Return the last trained step before `before` that was due."""
        return max((step for step in self._steps if step < before and self.was_due(step)), default=None)

    def has_result(self, step: int) -> bool:
        """Return whether eval/<step>.json is of the weights that the last attempt at `step` has trained, or later."""
        try:
            found = json.loads((self._folder / f"{step}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        attempt = found.get("attempt") if isinstance(found, dict) else None
        return isinstance(attempt, int) and attempt >= int(self._steps.get(step, {}).get("attempt", 0))
