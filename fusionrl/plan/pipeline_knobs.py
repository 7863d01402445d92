"""The controller's knobs of a run, from --pipeline and the flags that change its preset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of, has_own_rollout, is_streamed, knob_of
from fusionrl.pipeline.knobs import FLAGS, IN_TURN, PIPELINES, Knobs

if TYPE_CHECKING:
    from fusionrl.plan.plan import Plan


# Their groups stay in flight from rollout to rollout.
FULLY_ASYNC = (
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "fusionrl.compat.slime.api.fully_async.generate_rollout_fully_async",
    "fusionrl.slime_api.fully_async.generate_rollout_fully_async",  # its name in older run folders
)
_ANY_ENGINES = 1_000_000  # where their number is not known yet


def knobs_of(config: Config, num_rollout: int | None, num_engines: int) -> Knobs:
    """Return the knobs: the preset of --pipeline, and over it what the user gives."""
    rollout, knobs = config.rollout, vars(config.pipelining)
    assert rollout.rollout_batch_size is not None
    values: dict[str, object] = dict(PIPELINES[config.run.pipeline])
    values["max_samples_in_flight"] = rollout.sglang_server_concurrency * max(1, num_engines)
    most = values["max_samples_in_flight"]
    if (max_in_flight := knobs["max_samples_in_flight"]) is not None and max_in_flight > most:
        raise ValueError(
            f"--max-samples-in-flight {max_in_flight}: the engines take {most} requests;"
            " raise --sglang-server-concurrency"
        )
    values |= {knob: knobs[field] for knob, field in FLAGS.items() if knobs[field] is not None}
    staleness, lead = values["max_staleness"], values["lead"]
    if knobs["admission_lead"] is None and isinstance(staleness, int) and isinstance(lead, float):
        values["lead"] = min(lead, float(staleness))  # a preset's lead fits any bound
    spare = max(0, (rollout.over_sampling_batch_size or 0) - rollout.rollout_batch_size)
    if spare and values["max_staleness"]:
        raise ValueError(
            f"--pipeline {config.run.pipeline}: --over-sampling-batch-size {rollout.over_sampling_batch_size}: prompts"
            " that run ahead are trained later, so none are to spare; give --admission-lead in its place"
        )
    try:
        return Knobs(
            groups_per_fetch=rollout.rollout_batch_size,
            spare_groups=spare,
            exclusive=config.cluster.colocate,
            num_fetches=num_rollout or None,
            samples_per_group=rollout.n_samples_per_prompt + estimator_of(config.algorithm).needs_greedy_answer,
            **values,  # type: ignore[arg-type]  # of the types that the flags have
        )
    except ValueError as error:
        raise ValueError(f"--pipeline {config.run.pipeline}: {error}") from error


def describe_knobs(knobs: Knobs) -> str:
    """Return the knobs as the plan shows them."""
    pushes = "each rollout" if knobs.fetches_per_push == 1 else f"every {knobs.fetches_per_push} rollouts"
    return (
        f"staleness at most {knobs.max_staleness}, lead {knobs.lead:g}, a push after {pushes}, in flight:"
        f" {knobs.in_flight}, at the deadline: {knobs.at_deadline}, {knobs.max_samples_in_flight} samples in flight"
    )


def keeps_groups_in_flight(config: Config) -> bool:
    """Return whether the rollout function is slime's fully asynchronous one, which leaves groups in flight."""
    return config.rollout.rollout_function_path in FULLY_ASYNC


def pause_mode(config: Config, plan: Plan) -> str:
    """Return what a push does to running requests, as SGLang's /pause_generation calls it."""
    if plan.knobs is not None and plan.knobs.in_flight != "drain":
        return plan.knobs.in_flight
    # A rollout function of the user's own makes whole batches, and may keep requests under way.
    stays_in_flight = keeps_groups_in_flight(config) or (plan.knobs is not None and has_own_rollout(config))
    if stays_in_flight and "pause_generation_mode" not in config.given():
        return "retract"  # aborted, long answers would begin anew at each push, and short ones would win
    return config.weights.pause_generation_mode


def stream_errors(config: Config) -> list[str]:
    """List what does not go together with a pipeline that generates without pause."""
    errors = _worker_errors(config) if keeps_groups_in_flight(config) else []
    if not is_streamed(config):
        return errors
    rollout, flag = config.rollout, f"--pipeline {config.run.pipeline}"
    if config.cluster.colocate and (config.run.pipeline != "stream" or knob_of(config, "max_staleness")):
        errors.append(
            f"{flag}: with --colocate engines and trainers share devices and work in turn, so nothing can run ahead;"
            f" take --pipeline {IN_TURN} or stream, or leave out --colocate"
        )
    elif rollout.rollout_batch_size is not None:
        try:
            knobs_of(config, None, _ANY_ENGINES)
        except ValueError as error:
            errors.append(str(error))
    if rollout.partial_rollout:
        errors.append(
            f"{flag}: --partial-rollout belongs to --pipeline {IN_TURN}: it keeps what is unfinished when a rollout"
            " ends, and here samples are under way over all rollouts; leave it out (--in-flight says what a push does"
            " to them)"
        )
    if "pause_generation_mode" in config.given():
        errors.append(
            f"{flag}: --in-flight says what a push does to running samples; leave out --pause-generation-mode"
        )
    interval, pushes = config.eval.eval_interval, knob_of(config, "fetches_per_push")
    if interval is not None and interval % pushes:
        errors.append(
            f"{flag}: --eval-interval {interval} is not a multiple of the {pushes} rollouts between two pushes"
            " (--update-weights-interval): the engines would have older weights"
        )
    return errors


def _worker_errors(config: Config) -> list[str]:
    """List what does not go together with slime's fully asynchronous rollout function."""
    flag, errors = f"--rollout-function-path {config.rollout.rollout_function_path}", []
    if config.cluster.colocate:
        errors.append(
            f"{flag}: its groups are always in flight, so engines need devices of their own; leave out --colocate"
        )
    if config.rollout.dynamic_sampling_filter_path is not None:
        errors.append(f"{flag}: it asks no --dynamic-sampling-filter-path; leave that out")
    return errors
