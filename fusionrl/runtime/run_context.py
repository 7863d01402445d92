"""`Run`: the pieces that every loop is made of."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.buffer.actor import Rollout
from fusionrl.config.config import Config
from fusionrl.observe.spans import phase
from fusionrl.plan.plan import Plan
from fusionrl.runtime.buffer_handle import PendingRound
from fusionrl.runtime.reporter import Reporter
from fusionrl.runtime.run_actors import Actors
from fusionrl.runtime.supervisor import StopSignal

if TYPE_CHECKING:
    from fusionrl.runtime.background_eval import BackgroundEval
    from fusionrl.runtime.run import Saver

logger = logging.getLogger(__name__)

METRICS = """
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
    background_eval: BackgroundEval | None = field(init=False, default=None)
    """Evaluations run during training, on engines of their own."""

    def __post_init__(self) -> None:
        if self.plan.eval_bundles:
            from fusionrl.runtime.background_eval import BackgroundEval

            self.background_eval = BackgroundEval(self.actors.buffer, self.reporter, self._push_for_evaluation)

    def make_room_for_engines(self) -> None:
        """Bring back engines that died, and let the trainers give their memory away, where the two take turns."""
        self.actors.weights.restore_engines()
        self.actors.trainers.offload()

    def make_room_for_trainers(self) -> None:
        """Let the engines give their memory away, where the two take turns."""
        if self.plan.engines_give_memory:
            with phase("make room"):
                self.actors.engines.release_memory()

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
            return self.actors.weights.push(version, self.background_eval is not None and self.is_eval_due(version))

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate, and say the result. Engines of its own only begin it; it is recorded when it has ended."""
        if self.background_eval is not None:
            self.background_eval.begin(step, self.actors.weights.version)
            return {}
        self.reporter.status("evaluating")
        with phase("evaluate", step=step):
            self.make_room_for_engines()
            version = None if self.plan.transport is None else self.actors.weights.version
            values = self.actors.buffer.wait_evaluation(self.actors.buffer.start_evaluation(step, version))
        self.reporter.show_evaluation(step, values)
        return values

    def _push_for_evaluation(self, step: int) -> int | None:
        """Push the weights after `step` again, also to engines that evaluate; None where trainers have newer ones."""
        weights = self.actors.weights
        if self.last_trained + 1 != step or weights.version != step:
            return None
        weights.push(step, True)
        return step

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

    def free_eval_engines(self, step: int) -> dict[str, float]:
        """Before the push after `step`: wait for an evaluation whose engines it needs for the next. Returns metrics."""
        if self.background_eval is None or not self.is_eval_due(step):
            return {}
        with phase("wait for evaluation"):
            return {"perf/time_wait_eval_s": self.background_eval.finish()}

    def is_eval_owed(self) -> bool:
        """Return whether the run resumes from a step whose background evaluation has no result.

        Warns of one that started at an earlier step, whose weights are gone.
        """
        if self.background_eval is None or not (self.first_rollout and self.config.eval.eval_interval):
            return False
        from fusionrl.runtime.background_eval import PastEvaluations

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
        self.saver.save(self.last_trained, self.reporter.recorded(self.last_trained + 1))
        self.saver.finish()
        if self.background_eval is not None:
            self.background_eval.collect()
            if (step := self.background_eval.step) is not None:
                self.reporter.print(f"the evaluation after step {step} has not ended; it has no result")
