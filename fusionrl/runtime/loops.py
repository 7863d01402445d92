"""The loops: one function a pipeline or mode, each readable at a glance.

`Step` times, records and saves. A loop states the order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Self

from fusionrl.buffer.actor import Rollout
from fusionrl.buffer.evaluation import eval_table
from fusionrl.config.config import Config
from fusionrl.config.run_parts import uses_engines
from fusionrl.observe.spans import phase
from fusionrl.pipeline.knobs import IN_TURN
from fusionrl.plan.costs import Work
from fusionrl.runtime.run_context import Run
from fusionrl.runtime.supervisor import Terminated

Loop = Callable[[Run], None]


def on_policy(run: Run) -> None:
    """generate → train → push, one after the other: every sample comes from the newest weights."""
    _push_first(run)
    for step in steps(run):
        with step:
            run.reporter.status("generating")
            rollout = step.generate()
            run.make_room_for_trainers()
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
    run.make_room_for_engines()
    run.actors.buffer.stream.start(run.first_rollout)
    for step in steps(run):
        with step:
            run.reporter.status("generating")
            rollout = step.fetch()
            run.make_room_for_trainers()  # colocated: all groups of this version are ready
            run.reporter.status("training")
            step.train(rollout)
            run.reporter.status("pushing weights")
            step.push_if_due()
            step.measure("rollout/num_tokens")
            if run.is_eval_due(step.number):
                step.values |= run.evaluate(step.number)
    if run.background_eval is not None:
        run.background_eval.finish()  # first: the end of the stream tells every function that is at work to stop
    run.actors.buffer.stream.stop()


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
            run.last_trained = step.rollout_id  # nothing is trained: the answers are in the file
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
"""


class Step:
    """A context manager. Its end records the step, saves a checkpoint if one is due, and obeys a stop request.

    A stop request that comes between the training and the end skips what is left, but not the record and the
    checkpoint: a resume continues after this step. After an error `rescue` writes both.
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
                self.values |= actors.hardware.measure(self.values, self._work)
                reporter.record(self.number, self.values)
            self._run.unrecorded = None
            if self._saves:
                self._run.saver.save_if_due(self.rollout_id, reporter.recorded(self.number))
            if error is None:
                if self._run.background_eval is not None:
                    self._run.background_eval.collect()
                self._run.stop.check()

    def generate(self) -> Rollout:
        """Start the rollout and wait for it."""
        run = self._run
        with phase("generate", step=self.number):
            run.make_room_for_engines()
            rollout = run.wait_rollout(run.actors.buffer.start_rollout(self.rollout_id, run.actors.weights.version))
        self.values |= rollout.metrics
        return rollout

    def fetch(self) -> Rollout:
        """Wait for the next rollout of the stream."""
        run = self._run
        with phase("fetch", step=self.number):
            rollout = run.wait_rollout(run.actors.buffer.stream.next_rollout(self.rollout_id))
        self.values |= rollout.metrics
        return rollout

    def train(self, rollout: Rollout) -> None:
        """Train on the rollout, as a whole.

        Raises Terminated if SIGTERM came meanwhile; RuntimeError if an engine died meanwhile.
        """
        self._work = rollout.work
        self.values |= self._run.train(rollout)
        self._is_trained = True
        with phase("measure", step=self.number):
            self._run.actors.hardware.begin()
        self._run.stop.check()
        self._run.actors.check_engines(False)

    def push(self) -> None:
        """Bring the new weights to the engines."""
        self.values |= self._run.free_eval_engines(self.number) | self._run.push(self.number)

    def push_if_due(self) -> None:
        """Under a stream: tell it what is trained, and bring the new weights to the engines where they are due."""
        run = self._run
        self.values |= run.free_eval_engines(self.number)  # generation continues meanwhile
        stream, start = run.actors.buffer.stream, time.perf_counter()
        with phase("drain"):
            is_due = stream.trained()
        if is_due:
            self.values["perf/time_drain_s"] = time.perf_counter() - start
            self.values |= run.push(self.number)
            with phase("resume stream"):
                run.make_room_for_engines()
                stream.pushed(self.number)
        elif self.number == run.plan.num_rollout:
            self.values |= run.push(self.number)  # nothing is in flight any more; an evaluation comes

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
