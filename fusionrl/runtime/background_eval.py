"""Evaluations on separate engines (--eval-num-gpus) that run during training, and what a resume finds of them.

With --use-fault-tolerance an evaluation whose engines died fails: `eval/failed` replaces its result. The trainers no
longer have its weights, except after the last step: then the evaluation is repeated.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from fusionrl.observe.metrics import METRICS_FILE, STEP_TIME, read_metrics
from fusionrl.runtime.buffer_calls import PendingCall
from fusionrl.runtime.buffer_handle import BufferHandle, EvaluationLost
from fusionrl.runtime.reporter import Reporter

logger = logging.getLogger(__name__)

METRICS = """
eval/failed | evaluations | 1 where the engines of the evaluation died (--eval-num-gpus), and it has no other result.
    | --use-fault-tolerance
"""
_MOST_TRIES = 3
_WAS_DUE = "perf/time_wait_eval_s"  # in the row of a step that engines of an evaluation got the weights of


class BackgroundEval:
    """One evaluation at a time; its metrics are recorded under the step at which it started."""

    def __init__(self, buffer: BufferHandle, reporter: Reporter, push_again: Callable[[int], int | None]) -> None:
        """`push_again(step)` pushes the weights after a step again and returns their version; None if the trainers no
        longer have them."""
        self._buffer, self._reporter, self._push_again = buffer, reporter, push_again
        self._started: PendingCall | None = None
        self.step: int | None = None
        """Step of the running evaluation; None if there is none."""

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
        """Wait for the running evaluation, then record or restart it."""
        assert self._started is not None and self.step is not None
        step = self.step
        try:
            values = self._buffer.wait_evaluation(self._started)
        except EvaluationLost as error:
            self._started = self.step = None
            version = self._push_again(step) if num_tries < _MOST_TRIES else None
            if version is not None:
                logger.warning("the evaluation after step %d is repeated: %s", step, error)
                self.begin(step, version)
                return
            logger.warning("the evaluation after step %d failed; the run continues: %s", step, error)
            values = {"eval/failed": 1.0, "eval/engines_died": float(error.num_died)}
        self._reporter.record_evaluation(step, values)
        self._started = self.step = None


class PastEvaluations:
    """The evaluations that earlier attempts of a run started and finished, from metrics.jsonl and eval/.

    An attempt that resumed from an earlier checkpoint trained its steps again, to other weights: only results of the
    last attempt that trained a step count.
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
        """Return whether eval/<step>.json evaluates the weights of the last attempt that trained `step`."""
        try:
            result = json.loads((self._folder / f"{step}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        attempt = result.get("attempt") if isinstance(result, dict) else None
        return isinstance(attempt, int) and attempt >= int(self._steps.get(step, {}).get("attempt", 0))
