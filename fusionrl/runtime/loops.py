"""The loops: one function a pipeline or mode, each readable at a glance.

`Step` times, records and saves. A loop states the order.
"""

from collections.abc import Callable

from fusionrl.buffer.evaluation import eval_table
from fusionrl.config.config import Config
from fusionrl.pipeline.knobs import IN_TURN
from fusionrl.runtime.run_context import Run
from fusionrl.runtime.step import steps

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
    run.background_eval.finish()


def streamed(run: Run) -> None:
    """Generate while trainers train; the Buffer's controller decides what is trained and when to push."""
    _push_first(run)
    run.begin_stream()
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
