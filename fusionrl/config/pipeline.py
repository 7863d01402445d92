"""--pipeline: its flags, the controller's knobs that follow from them, and what goes with running ahead. Pure.

Trainers that get ahead of the engines learn from tokens of older weights, and --use-tis is then on by default:
decoupled PPO (arXiv 2505.24298) takes the ratio to the proximal policy, the weights before the step, and clips it; what
lies between that policy and the one that sampled is a weight of each token, truncated at --tis-clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from fusionrl.base.wording import attempt
from fusionrl.config import scopes
from fusionrl.config.run_parts import estimator_of, has_own_rollout, has_policy_loss, is_streamed
from fusionrl.config.scopes import Group, Scope, acting, of_engines
from fusionrl.pipeline.knobs import FLAGS, IN_TURN, PIPELINES, Knobs

if TYPE_CHECKING:
    from fusionrl.config.config import Config

STREAMED = Scope(
    f"without a --pipeline that runs ahead ({', '.join(name for name in PIPELINES if name != IN_TURN)})", is_streamed
)
of_stream = acting(scopes.RL, STREAMED)

# `Knobs` declares each of these flags.
if TYPE_CHECKING:
    _KnobFlags = Group
else:
    _KnobFlags = create_model(
        "_KnobFlags",
        __base__=Group,
        **{
            name: (
                knob.type if (default := knob.metadata["given"]) is not None else knob.type | None,
                of_stream(default, knob.metadata["help"], ge=knob.metadata["least"]),
            )
            for name, knob in FLAGS.items()
        },
    )


class PipelineGroup(_KnobFlags):
    """Pipeline: how far generation may run ahead of training"""

    sample_timeout: float | None = of_engines(
        None,
        "Time limit of a sample, seconds, from its first request to its last token, tools included; a sample over it"
        " fails and is not trained on. A function that blocks its thread cannot be stopped. Default: none.",
        gt=0,
    )
    failed_samples: Literal["leave-out", "replace"] = of_stream(
        "leave-out", "Train a group without its failed samples, or replace the whole group (always if all failed)."
    )
    replay_schedule: str | None = of_stream(
        None,
        "Folder of an earlier run with the same flags: admit, fetch, push and drop groups in its order, and sample each"
        " token by the same version of the weights. Not with --in-flight in_place. Default: none.",
    )


# ------------------------------------------------------------------------------------------------ knobs
# Their groups stay in flight from rollout to rollout.
FULLY_ASYNC = (
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "fusionrl.compat.slime.api.fully_async.generate_rollout_fully_async",
    "fusionrl.slime_api.fully_async.generate_rollout_fully_async",  # its name in older run folders
)
_ANY_ENGINES = 1_000_000  # where their number is not known yet


def knob_of(config: Config, name: str) -> Any:
    """Return the value of a pipeline's knob: its flag's, or where that is not given the pipeline's."""
    given = getattr(config.pipelining, name)
    return PIPELINES[config.run.pipeline][name] if given is None else given


def knobs_of(config: Config, num_rollout: int | None, num_engines: int) -> Knobs:
    """Return the knobs: the preset of --pipeline, and over it what the user gives."""
    rollout, given = config.rollout, vars(config.pipelining)
    assert rollout.rollout_batch_size is not None
    values: dict[str, object] = dict(PIPELINES[config.run.pipeline])
    values["max_samples_in_flight"] = rollout.sglang_server_concurrency * max(1, num_engines)
    most = values["max_samples_in_flight"]
    if (max_in_flight := given["max_samples_in_flight"]) is not None and max_in_flight > most:
        raise ValueError(
            f"--max-samples-in-flight {max_in_flight}: the engines take {most} requests;"
            " raise --sglang-server-concurrency"
        )
    values |= {name: given[name] for name in FLAGS if given[name] is not None}
    staleness, lead = values["max_staleness"], values["admission_lead"]
    if given["admission_lead"] is None and isinstance(staleness, int) and isinstance(lead, float):
        values["admission_lead"] = min(lead, float(staleness))  # a preset's lead fits any bound
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
    pushes = "each rollout" if knobs.update_weights_interval == 1 else f"every {knobs.update_weights_interval} rollouts"
    return (
        f"staleness at most {knobs.max_staleness}, lead {knobs.admission_lead:g}, a push after {pushes}, in flight:"
        f" {knobs.in_flight}, at the deadline: {knobs.at_deadline}, {knobs.max_samples_in_flight} samples in flight"
    )


def keeps_groups_in_flight(config: Config) -> bool:
    """Return whether the rollout function is slime's fully asynchronous one, which leaves groups in flight."""
    return config.rollout.rollout_function_path in FULLY_ASYNC


def pause_mode(config: Config, knobs: Knobs | None) -> str:
    """Return what a push does to running requests, as SGLang's /pause_generation calls it."""
    if knobs is not None and knobs.in_flight != "drain":
        return knobs.in_flight
    # A rollout function of the user's own makes whole batches, and may keep requests under way.
    stays_in_flight = keeps_groups_in_flight(config) or (knobs is not None and has_own_rollout(config))
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
        attempt(errors, lambda: knobs_of(config, None, _ANY_ENGINES))
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
    interval, pushes = config.eval.eval_interval, knob_of(config, "update_weights_interval")
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


# ------------------------------------------------------------------------------------------------ older tokens
# Fields that decide the default, in addition to the flag itself.
CORRECTION_READS = (
    *("mode", "pipeline", "debug_train_only", "debug_rollout_only", "max_staleness", "update_weights_interval"),
    *("loss_type", "policy_loss", "custom_policy_loss_path", "custom_tis_function_path", "use_rollout_logprobs"),
    *("rejection_level", "tis_veto"),
)


def trains_older_tokens(config: Config) -> bool:
    """Return whether trainers get tokens that older weights sampled: by the bound, or by rollouts between pushes."""
    is_older = knob_of(config, "max_staleness") > 0 or knob_of(config, "update_weights_interval") > 1
    return is_streamed(config) and is_older


def needs_correction(config: Config) -> bool:
    """Return whether the built-in policy loss takes such tokens for tokens of the newest weights.

    DPO learns from pairs of any policy; a user's own loss or correction is left alone.
    """
    a = config.algorithm
    is_built_in = a.loss_type == "policy_loss" and a.custom_policy_loss_path is None and a.policy_loss != "dpo"
    corrects = a.use_rollout_logprobs or a.custom_tis_function_path is not None
    return trains_older_tokens(config) and is_built_in and not corrects


def corrects_by_default(config: Config) -> bool:
    """Return whether --use-tis is on by default, not by the user's choice."""
    return config.algorithm.use_tis and "use_tis" not in config.algorithm.model_fields_set


def with_default(config: Config) -> Config:
    """Return the configuration with --use-tis where the loss needs it and the user has chosen nothing of the kind.

    --rejection-level and --tis-veto are a choice: they leave out what is far off, and weigh nothing.
    """
    a = config.algorithm
    has_chosen = "use_tis" in a.model_fields_set or a.rejection_level is not None or a.tis_veto is not None
    if has_chosen or not needs_correction(config):
        return config
    algorithm = a.model_copy(update={"use_tis": True})
    algorithm.model_fields_set.discard("use_tis")
    copy = config.model_copy(update={"algorithm": algorithm})
    if "algorithm" not in config.model_fields_set:
        copy.model_fields_set.discard("algorithm")
    return copy


def correction_text(config: Config) -> str | None:
    """Return what the loss does about such tokens, for the plan; None where there are none."""
    a = config.algorithm
    if not trains_older_tokens(config):
        return None
    if not needs_correction(config):
        if a.use_rollout_logprobs and a.loss_type == "policy_loss" and a.custom_policy_loss_path is None:
            return "the ratio is taken to the engine's log-probs (--use-rollout-logprobs)"
        return None
    if not a.use_tis:
        return "tokens of older weights are taken for tokens of the newest"
    default = f", the default of --pipeline {config.run.pipeline}, off by --no-use-tis"
    why = default if corrects_by_default(config) else ""
    verb = {"truncate": "truncated to", "mask": "0 outside of", "none": "not used, range"}[a.tis_mode]
    return (
        "decoupled: ratio to the log-probs of before the step, computed again where a rollout has several; each token"
        f" weighed by its ratio to the engine's log-prob, {verb} {a.tis_clip_low:g} … {a.tis_clip:g} (--use-tis{why})"
    )


def staleness_warnings(config: Config) -> list[str]:
    """A text where tokens of older weights are trained on, and the loss does not know of it."""
    is_meant = needs_correction(config) and has_policy_loss(config) and not config.algorithm.use_tis
    if not is_streamed(config) or not is_meant or config.rollout.rollout_batch_size is None:
        return []
    try:
        knobs = knobs_of(config, None, 1)
    except ValueError:  # an error tells it
        return []
    age = f"tokens may be {knobs.max_staleness} versions old"
    if not knobs.max_staleness:
        if knobs.update_weights_interval == 1:
            return []
        age = f"weights have moved for the later of the {knobs.update_weights_interval} rollouts between two pushes"
    cure = "add --use-tis (decoupled PPO) or --use-rollout-logprobs"
    return [f"--pipeline {config.run.pipeline}: {age}, and the loss does not correct for it; {cure}"]
