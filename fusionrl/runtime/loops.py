"""The loops: one function a pipeline or mode, each readable at a glance.

`Step` times, records and saves. A loop states the order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from fusionrl.buffer.evaluation import eval_table
from fusionrl.buffer.rollout_stages import Rollout
from fusionrl.config.config import Config
from fusionrl.config.run_parts import uses_engines
from fusionrl.observe.spans import note_failure, phase
from fusionrl.pipeline.knobs import IN_TURN
from fusionrl.plan.costs import Work
from fusionrl.runtime.buffer_calls import PendingCall
from fusionrl.runtime.supervisor import Terminated

if TYPE_CHECKING:
    from fusionrl.runtime.run import Run

Loop = Callable[["Run"], None]


def on_policy(run: Run) -> None:
    """generate → train → push, one after the other: every sample comes from the newest weights."""
    _push_first(run)
    for step in steps(run):
        with step:
            run.reporter.status("generating")
            rollout = step.generate()
            run.actors.engines.release_memory()  # where engines and trainers take turns
            run.reporter.status("training")
            step.train(rollout)
            run.reporter.status("pushing weights")
            step.push()
            step.measure("rollout/num_tokens")
            if run.is_eval_due(step.number):
                step.values |= run.evaluate(step.number)
    if run.background_eval is not None:
        run.background_eval.finish()


def streamed(run: Run) -> None:
    """Generate while trainers train; the Buffer's controller decides what is trained and when to push."""
    _push_first(run)
    buffer, weights = run.actors.buffer, run.actors.weights

    def bring_weights(version: int) -> None:
        if weights.version != version:
            run.push(version)
        run.prepare_round()

    buffer.begin_stream(bring_weights)
    for step in steps(run):
        with step:
            run.reporter.status("generating")
            rollout = step.fetch()
            run.actors.engines.release_memory()  # colocated: all groups of this version are ready
            run.reporter.status("training")
            step.train(rollout)
            run.reporter.status("pushing weights")
            step.push_if_due()
            step.measure("rollout/num_tokens")
            if run.is_eval_due(step.number):
                step.values |= run.evaluate(step.number)
    if run.background_eval is not None:
        run.background_eval.finish()  # first: the end of the stream tells every function that is at work to stop
    buffer.end_stream()


def _push_first(run: Run) -> None:
    """Push the initial weights to the engines, and evaluate them if the flags say so."""
    values = run.push(run.first_rollout)
    if run.is_eval_first:
        values |= run.evaluate(0)
    elif run.is_eval_owed():
        run.evaluate(run.first_rollout)
    run.reporter.record(run.first_rollout, values)


def sft(run: Run) -> None:
    """Supervised training: conversations → train. No engines."""
    if run.is_eval_first:
        run.reporter.record(0, run.validate(0))
    for step in steps(run):
        with step:
            step.train(step.generate())
            step.measure("train/num_tokens")
            if run.is_eval_due(step.number):
                step.values |= run.validate(step.number)


def reject_sampling(run: Run) -> None:
    """Generate and keep what the reward accepts, in the form that `sft` reads; weights are pushed once."""
    values = run.push(0) if run.actors.trainers else {}
    num_accepted = num_considered = 0
    for step in steps(run):
        with step:
            step.values |= values
            values = {}
            step.generate()
            # Nothing is trained: the answers are in the file.
            run.last_trained = run.actors.buffer.last_done = step.rollout_id
            step.measure("rollout/num_tokens")
        num_accepted += int(step.values["rollout/accepted"])
        num_considered += int(step.values["rollout/considered"])
    output = run.config.reject_sampling.reject_sampling_output or run.path / "accepted.jsonl"
    run.reporter.print(f"accepted {num_accepted} of {num_considered} samples: {output}")


def rollout_only(run: Run) -> None:
    """--debug-rollout-only: engines and Buffer without trainers."""
    for step in steps(run, saves=False):
        with step:
            step.generate()


def train_only(run: Run) -> None:
    """--debug-train-only: trainers on saved rollouts without engines."""
    for step in steps(run):
        with step:
            step.train(step.generate())


def evaluate_only(run: Run) -> None:
    """Evaluate the checkpoint that the engines loaded, and show all of the result."""
    values = run.evaluate(0)
    run.reporter.record(0, values)
    run.reporter.print(eval_table(values))


MODES: dict[str, Loop] = {"sft": sft, "reject-sampling": reject_sampling, "eval": evaluate_only}


def choose_loop(config: Config) -> Loop:
    """The function that runs this configuration."""
    if config.run.debug_rollout_only:
        return rollout_only
    if config.run.debug_train_only and config.run.mode == "rl":
        return train_only
    if config.run.mode == "rl":
        return on_policy if config.run.pipeline == IN_TURN else streamed
    return MODES[config.run.mode]


def steps(run: Run, saves: bool = True) -> Iterator[Step]:
    """The steps of a run that are left. `saves`: checkpoints are written after them, as the flags say."""
    for rollout_id in range(run.first_rollout, run.plan.num_rollout):
        yield Step(run, rollout_id, saves)


METRICS = """
perf/step_time_s | seconds | The whole step: rollout, training, weight push. Evaluations and checkpoints are not in
    it. Of a step that a stop or an error ended: until then.
perf/engines_idle | share | Share of the time in which engines had no sample, or were held up by a push: between two
    batches of a pipeline that runs ahead; else what perf/time_generate_s leaves of the step.
perf/trainers_idle | share | What training and the weight push leave of the step. | runs that train
perf/time_drain_s | seconds | How long the push waited until nothing stood in its way: samples in flight, with
    --in-flight drain. | --pipeline that runs ahead
perf/tokens_per_s | tokens/s | Response tokens of the rollout divided by perf/step_time_s; in mode sft trained tokens.
perf/time_train_s | seconds | Training: all forward passes and optimizer steps, critic and reward model included.
perf/time_wait_eval_s | seconds | How long a push waited for the evaluation before, whose engines the next one needs.
    | --eval-num-gpus, where an evaluation follows
"""


class Step:
    """A context manager. Its end records the step, saves a checkpoint if one is due, and obeys a stop request.

    A stop request that comes between the training and the end skips what is left, but not the record and the
    checkpoint: a resume continues after this step. After an error `Run.rescue` writes both.
    """

    def __init__(self, run: Run, rollout_id: int, saves: bool) -> None:
        self._run, self.rollout_id, self._saves = run, rollout_id, saves
        self.number = rollout_id + 1
        """Steps that are finished with this one; the version of the weights after it."""
        self.values: dict[str, float] = {}
        self._is_trained = False
        self._work = Work()  # of what was trained

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._spans = ExitStack()
        self._spans.enter_context(phase("step", step=self.number))
        if self._run.actors.profiling is not None:
            self._run.actors.profiling.begin(self.number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        # A stop or an error may come before `measure`.
        self.values.setdefault("perf/step_time_s", time.perf_counter() - self._start)
        if error is not None:  # the phase ends below, as if all was well
            note_failure(error, "step", {"step": self.number})
        with self._spans:
            if self._is_trained:
                self._run.unrecorded = self.number, self.values
            if error is not None and not (self._is_trained and isinstance(error, Terminated)):
                return
            actors, reporter = self._run.actors, self._run.reporter
            if actors.profiling is not None:
                actors.profiling.end(self.number)
            with phase("record", step=self.number):
                if actors.clocks is not None:
                    actors.clocks.measure()
                self.values |= actors.hardware.measure(self.values, self._work) | actors.restarts.metrics()
                reporter.record(self.number, self.values)
            self._run.unrecorded = None
            if self._is_trained and not self._run.plan.trainers_give_memory:
                actors.recovery.take_snapshot_if_due(self.rollout_id)
            if self._saves:
                actors.recovery.retry(self._save, of_engines=self._run.plan.takes_turns)
            self._run.retention.after_step(self.number)
            if error is None:
                if self._run.background_eval is not None:
                    self._run.background_eval.collect()
                self._run.stop.check()

    def _save(self) -> None:
        self._run.saver.save_if_due(self.rollout_id, self._run.reporter.recorded(self.number))

    def generate(self) -> Rollout:
        """Start the rollout and wait for it."""
        actors = self._run.actors
        with phase("generate", step=self.number):
            self._run.prepare_round()
            return self._wait(actors.buffer.start_rollout(self.rollout_id, actors.weights.version))

    def fetch(self) -> Rollout:
        """Wait for the next rollout of the stream."""
        with phase("fetch", step=self.number):
            return self._wait(self._run.actors.buffer.next_rollout(self.rollout_id))

    def _wait(self, started: PendingCall) -> Rollout:
        """Wait for a rollout; show --log-samples of it, and warn where there is nothing to learn from it."""
        rollout = self._run.actors.buffer.wait_rollout(started)
        self._run.reporter.show_rollout(rollout)
        self.values |= rollout.metrics
        return rollout

    def train(self, rollout: Rollout) -> None:
        """Take the optimizer steps of a rollout, as a whole. Meanwhile engines are checked and stop requests noticed.

        Raises Terminated if SIGTERM came meanwhile; RuntimeError if an engine died meanwhile.
        """
        run, actors = self._run, self._run.actors
        self._work = rollout.work
        with phase("train", step=self.number):
            start = time.perf_counter()
            self.values |= actors.recovery.train(rollout)
            self.values["perf/time_train_s"] = time.perf_counter() - start
        run.last_trained = actors.buffer.last_done = rollout.rollout_id
        self._is_trained = True
        if run.config.run.mode == "rl":
            with phase("columns", step=self.number):  # on a slow disk it waits for the rows of the step before
                actors.recovery.retry(lambda: self._add_columns(rollout.rollout_id))
        if run.plan.trainers_give_memory:  # else after the push, which does not wait for it then
            actors.recovery.take_snapshot_if_due(rollout.rollout_id)
        if run.plan.engines_give_memory and self._saves:  # with the push they take it back
            start = time.perf_counter()
            actors.recovery.retry(lambda: run.saver.begin_if_due(rollout.rollout_id))
            self._start += time.perf_counter() - start  # the time of a step is without checkpoints
        with phase("measure", step=self.number):
            actors.hardware.begin()
        run.stop.check()
        actors.check_engines(False)

    def _add_columns(self, rollout_id: int) -> None:
        actors = self._run.actors
        actors.buffer.add_trained(rollout_id, actors.trainers.sample_columns(rollout_id))

    def push(self) -> None:
        """Bring the new weights to the engines; to those that only evaluate where an evaluation is due."""
        self._finish_evaluation()
        self._push()

    def push_if_due(self) -> None:
        """Under a stream: tell it what is trained, and bring the new weights to the engines where they are due."""
        actors = self._run.actors
        self._finish_evaluation()  # generation continues meanwhile
        start = time.perf_counter()
        with phase("drain"):
            is_due = actors.buffer.rollout_trained()
        if is_due:
            self.values["perf/time_drain_s"] = time.perf_counter() - start
            self._push()
            with phase("resume stream"):
                self._run.prepare_round()
                actors.buffer.weights_pushed(self.number)
        elif self.number == self._run.plan.num_rollout:
            self._push()  # nothing is in flight any more; an evaluation comes

    def _push(self) -> None:
        evaluates = self._run.background_eval is not None and self._run.is_eval_due(self.number)
        self.values |= self._run.push(self.number, to_evaluation=evaluates)

    def _finish_evaluation(self) -> None:
        """Before a push that an evaluation follows: wait for the one before, which uses the same engines."""
        if self._run.background_eval is not None and self._run.is_eval_due(self.number):
            with phase("wait for evaluation"):
                self.values["perf/time_wait_eval_s"] = self._run.background_eval.finish()

    def measure(self, tokens: str) -> None:
        """Note the time since the step began; throughput counts the metric `tokens`."""
        self.values["perf/step_time_s"] = time.perf_counter() - self._start
        self.values["perf/tokens_per_s"] = self.values[tokens] / self.values["perf/step_time_s"]
        self.values |= idle_shares(self.values, uses_engines(self._run.config))


def idle_shares(values: Mapping[str, float], has_engines: bool) -> dict[str, float]:
    """Return the shares of a step in which trainers, or engines, had nothing to do; from the times of the step's row.

    A stream reports the engines' share itself.
    """
    step, shares = values["perf/step_time_s"], {}
    if "perf/time_train_s" in values:
        busy = values["perf/time_train_s"] + values.get("perf/time_sync_s", 0.0)
        shares["perf/trainers_idle"] = max(0.0, 1.0 - busy / step)
    if has_engines and "perf/engines_idle" not in values and "perf/time_generate_s" in values:
        shares["perf/engines_idle"] = max(0.0, 1.0 - values["perf/time_generate_s"] / step)
    return shares
