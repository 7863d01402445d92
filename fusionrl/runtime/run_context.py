"""`Run`: the pieces that every loop is made of, and evaluations that engines of their own make meanwhile.

With --use-fault-tolerance a background evaluation whose engines died fails: `eval/failed` replaces its result. The
trainers no longer have its weights, except after the last step: then the evaluation is repeated.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.buffer.actor import Rollout
from fusionrl.config.config import Config
from fusionrl.observe.metrics import METRICS_FILE, STEP_TIME, read_metrics
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.runtime.buffer_handle import BufferHandle, EvaluationLost, PendingRound
from fusionrl.runtime.reporter import Reporter
from fusionrl.runtime.run_actors import Actors
from fusionrl.runtime.supervisor import StopSignal

if TYPE_CHECKING:
    from fusionrl.runtime.run import Saver

logger = logging.getLogger(__name__)

_MOST_TRIES = 3
_WAS_DUE = "perf/time_wait_eval_s"  # in the row of a step that engines of an evaluation got the weights of


class BackgroundEval:
    """One evaluation at a time; its metrics are recorded under the step at which it started."""

    def __init__(self, buffer: BufferHandle, reporter: Reporter, push_again: Callable[[int], int | None]) -> None:
        """`push_again(step)` pushes the weights after a step again and returns their version; None if the trainers no
        longer have them."""
        self._buffer, self._reporter, self._push_again = buffer, reporter, push_again
        self._started: PendingRound | None = None
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


METRICS = """
eval/failed | evaluations | 1 where the engines of the evaluation died (--eval-num-gpus), and it has no other result.
    | --use-fault-tolerance
perf/time_train_s | seconds | Training: all forward passes and optimizer steps, critic and reward model included.
perf/time_wait_eval_s | seconds | How long a push waited for the evaluation before, whose engines the next one needs.
    | --eval-num-gpus, where an evaluation follows
"""


@dataclass
class Run:
    """A run that is set up: its actors, and where its numbers and checkpoints go. It holds references, no samples."""

    config: Config
    plan: Plan
    path: Path
    actors: Actors
    reporter: Reporter
    saver: Saver
    stop: StopSignal
    first_rollout: int  # 0, or the first after the checkpoint that the run resumes from
    last_trained: int  # the last rollout whose training is finished; -1: none yet
    unrecorded: tuple[int, dict[str, float]] | None = None  # a trained step whose row is not written yet
    background_eval: BackgroundEval = field(init=False)

    def __post_init__(self) -> None:
        self.background_eval = BackgroundEval(self.actors.buffer, self.reporter, self._push_for_evaluation)

    def start_rollout(self, rollout_id: int) -> PendingRound:
        """Begin a rollout with all engines. Returns at once; see `wait_rollout`."""
        self.make_room_for_engines()
        return self.actors.buffer.start_rollout(rollout_id, self.actors.weights.version)

    def make_room_for_engines(self) -> None:
        """Bring back engines that died, and let the trainers give their memory away, where the two take turns."""
        self.actors.weights.restore_engines()
        self.actors.trainers.offload()

    def make_room_for_trainers(self) -> None:
        """Let the engines give their memory away, where the two take turns."""
        if self.plan.engines_give_memory:
            with phase("make room"):
                self.actors.engines.release_memory()

    def begin_stream(self) -> None:
        """Begin to generate without pause; the engines have their weights."""
        self.make_room_for_engines()
        self.actors.buffer.stream.start(self.first_rollout)

    def wait_rollout(self, started: PendingRound) -> Rollout:
        """Wait for a rollout; shows --log-samples of it, and warns where there is nothing to learn from it."""
        rollout = self.actors.buffer.wait_rollout(started)
        self.reporter.show_rollout(rollout)
        return rollout

    def train(self, rollout: Rollout) -> dict[str, float]:
        """The optimizer steps of a rollout, as a whole. Meanwhile engines are watched and stop requests noticed."""
        step = rollout.rollout_id + 1
        with phase("train", step=step):
            start = time.perf_counter()
            values = self.actors.trainers.train(rollout.rollout_id, rollout.shards, rollout.auxiliary_shards)
            values["perf/time_train_s"] = time.perf_counter() - start
        self.last_trained = rollout.rollout_id
        if self.config.run.mode == "rl":
            with phase("columns", step=step):  # on a slow disk it waits for the rows of the step before
                columns = self.actors.trainers.sample_columns(rollout.rollout_id)
                self.actors.buffer.add_trained(rollout.rollout_id, columns)
        return values

    def push(self, version: int) -> dict[str, float]:
        """Bring the trainers' weights to the engines; to those that only evaluate where an evaluation is due."""
        with phase("push", version=version):
            return self.actors.weights.push(version, self.has_eval_engines and self.is_eval_due(version))

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate, and say the result. Engines of its own only begin it; it is recorded when it has ended."""
        if self.has_eval_engines:
            self.background_eval.begin(step, self.actors.weights.version)
            return {}
        self.reporter.status("evaluating")
        with phase("evaluate", step=step):
            self.make_room_for_engines()
            values = self.actors.buffer.wait_evaluation(self.actors.buffer.start_evaluation(step, self.pushed_version))
        self.reporter.show_evaluation(step, values)
        return values

    def _push_for_evaluation(self, step: int) -> int | None:
        """Push the weights after `step` again, also to engines that evaluate; None where trainers have newer ones."""
        weights = self.actors.weights
        if self.last_trained + 1 != step or weights.version != step:
            return None
        weights.push(step, True)
        return step

    @property
    def pushed_version(self) -> int | None:
        """The version of the engines' weights; None in a mode where nothing is pushed."""
        return None if self.plan.transport is None else self.actors.weights.version

    def validate(self, step: int) -> dict[str, float]:
        """Validation losses of --mode sft, and say them."""
        self.reporter.status("validating")
        with phase("validate", step=step):
            values = self.actors.trainers.validation_losses(self.actors.buffer.validation_shards())
        self.reporter.show_evaluation(step, values)
        return values

    @property
    def is_eval_first(self) -> bool:
        """Return whether there is an evaluation before the first step."""
        return self.config.eval.has_sets and not self.config.eval.skip_eval_before_train and self.first_rollout == 0

    @property
    def has_eval_engines(self) -> bool:
        """Return whether evaluations run during training, on separate engines."""
        return bool(self.plan.eval_bundles)

    def free_eval_engines(self, step: int) -> dict[str, float]:
        """Before the push after `step`: wait for an evaluation whose engines it needs for the next. Returns metrics."""
        if not (self.has_eval_engines and self.is_eval_due(step)):
            return {}
        with phase("wait for evaluation"):
            return {"perf/time_wait_eval_s": self.background_eval.finish()}

    def is_eval_owed(self) -> bool:
        """Return whether the run resumes from a step whose background evaluation has no result.

        Warns of one that started at an earlier step, whose weights are gone.
        """
        if not (self.has_eval_engines and self.first_rollout and self.config.eval.eval_interval):
            return False
        past = PastEvaluations(self.path)
        lost = past.last_begun(before=self.first_rollout)
        if lost is not None and not past.has_result(lost):
            logger.warning("the evaluation after step %d had not ended when the run stopped; it has no result", lost)
        is_due = self.is_eval_due(self.first_rollout) or past.was_due(self.first_rollout)
        return is_due and not past.has_result(self.first_rollout)

    def is_eval_due(self, step: int) -> bool:
        """Every --eval-interval steps, and after the last one."""
        interval = self.config.eval.eval_interval
        return interval is not None and (step % interval == 0 or step == self.plan.num_rollout)

    def end_early(self) -> None:
        """After a stop: publish a checkpoint, and record the background evaluation if it has ended."""
        self.save()
        self.background_eval.collect()
        if self.background_eval.step is not None:
            self.reporter.print(
                f"the evaluation after step {self.background_eval.step} has not ended; it has no result"
            )

    def save(self) -> None:
        """Publish a checkpoint of what is trained, and wait until it is there."""
        self.saver.save(self.last_trained, self.reporter.recorded(self.last_trained + 1))
        self.saver.finish()
