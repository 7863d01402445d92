"""The parts of a run (engines, trainers) and their work, by the mode and the --debug-… flags.

And the loss of tokens that older weights sampled: where trainers get ahead of the engines, --use-tis is on by default.
Decoupled PPO (arXiv 2505.24298) takes the ratio to the proximal policy, the weights before the step, and clips it; what
lies between that policy and the one that sampled is a weight of each token, truncated at --tis-clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusionrl.algorithms.estimators import ESTIMATORS, Estimator
from fusionrl.pipeline.knobs import FLAGS, IN_TURN, PIPELINES

if TYPE_CHECKING:
    from fusionrl.config.algorithm import AlgorithmGroup
    from fusionrl.config.config import Config

DEFAULT_ROLLOUT = "fusionrl.rollout.sglang_rollout.generate_rollout"
DEFAULT_SOURCE = "fusionrl.buffer.data_source.RolloutDataSource"


def estimator_of(algorithm: AlgorithmGroup) -> Estimator:
    """Return the entry of --advantage-estimator in the table of estimators."""
    return ESTIMATORS[algorithm.advantage_estimator]


def policy_loss_name(algorithm: AlgorithmGroup) -> str:
    """Return the policy loss that the flags choose; a user's own is called as ppo is."""
    if algorithm.custom_policy_loss_path is not None:
        return "ppo"
    return estimator_of(algorithm).policy_loss if algorithm.policy_loss == "auto" else algorithm.policy_loss


def needs_reference(algorithm: AlgorithmGroup) -> bool:
    """Return whether training needs a reference model, whose log-probs the loss or the rewards use."""
    return algorithm.use_kl_loss or algorithm.kl_coef > 0 or algorithm.policy_loss == "dpo"


def uses_trainers(config: Config) -> bool:
    """Return whether the mode has trainers (the table of modes)."""
    run = config.run
    if run.mode == "eval" or run.debug_rollout_only:
        return False
    return not (run.mode == "reject-sampling" and config.reject_sampling.no_trainer)


def uses_engines(config: Config) -> bool:
    """Return whether the mode has engines (the table of modes)."""
    return config.run.mode != "sft" and not config.run.debug_train_only


def changes_weights(config: Config) -> bool:
    """Return whether optimizer steps are made; --mode reject-sampling has trainers only to push a checkpoint."""
    return uses_trainers(config) and config.run.mode in ("rl", "sft")


def has_policy_loss(config: Config) -> bool:
    """Return whether trainers learn from rewards: the policy, or with --advantage-estimator ppo at least the critic."""
    algorithm = config.algorithm
    is_sft = algorithm.loss_type == "sft_loss" and estimator_of(algorithm).role != "critic"
    return changes_weights(config) and config.run.mode == "rl" and not is_sft


def generates(config: Config) -> bool:
    """Return whether engines answer prompts to train on or to choose from."""
    return uses_engines(config) and config.run.mode != "eval"


def evaluates(config: Config) -> bool:
    """Return whether engines answer the evaluation sets, if there are any."""
    run = config.run
    return run.mode == "eval" or (run.mode == "rl" and not (run.debug_rollout_only or run.debug_train_only))


def validates(config: Config) -> bool:
    """Return whether trainers report the loss of the evaluation sets, if there are any."""
    return config.run.mode == "sft" and not config.run.debug_rollout_only


def saves(config: Config) -> bool:
    """Return whether the loop comes to points where a checkpoint may be saved."""
    return config.run.mode != "eval" and not config.run.debug_rollout_only


def is_streamed(config: Config) -> bool:
    """Return whether the run generates without pause, under the controller."""
    run = config.run
    return run.mode == "rl" and run.pipeline != IN_TURN and not run.debug_train_only and not run.debug_rollout_only


def knob_of(config: Config, name: str) -> Any:
    """Return the value of a pipeline's knob: its flag's, or where that is not given the pipeline's."""
    given = getattr(config.pipelining, FLAGS[name])
    return PIPELINES[config.run.pipeline][name] if given is None else given


def has_own_rollout(config: Config) -> bool:
    """Return whether a user's function makes the rollouts."""
    return config.rollout.rollout_function_path != DEFAULT_ROLLOUT


def evaluates_by_default(config: Config) -> bool:
    """Return whether the default rollout function evaluates."""
    return (config.rollout.eval_function_path or config.rollout.rollout_function_path) == DEFAULT_ROLLOUT


def has_own_source(config: Config) -> bool:
    """Return whether a user's class gives the prompts."""
    return config.data.data_source_path != DEFAULT_SOURCE


def reads_prompts(rollout_function_path: str, custom_generate_function_path: str | None) -> bool:
    """Return whether a user's function makes tokens of the prompts: it may want lists of messages as they are."""
    return rollout_function_path != DEFAULT_ROLLOUT or custom_generate_function_path is not None


def asks_for_routing(config: Config) -> bool:
    """Return whether the default rollout asks the engines which experts they chose: no function or file tells it."""
    separate = (
        config.rollout.custom_generate_function_path,
        config.reward.custom_convert_samples_to_train_data_path,
        config.run.load_debug_rollout_data,
    )
    return config.algorithm.use_rollout_routing_replay and not has_own_rollout(config) and not any(separate)


# Fields that decide the default, in addition to the flag itself.
CORRECTION_READS = (
    *("mode", "pipeline", "debug_train_only", "debug_rollout_only", "max_staleness", "update_weights_interval"),
    *("loss_type", "policy_loss", "custom_policy_loss_path", "custom_tis_function_path", "use_rollout_logprobs"),
    *("rejection_level", "tis_veto"),
)


def trains_older_tokens(config: Config) -> bool:
    """Return whether trainers get tokens that older weights sampled: by the bound, or by rollouts between pushes."""
    return is_streamed(config) and (knob_of(config, "max_staleness") > 0 or knob_of(config, "fetches_per_push") > 1)


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
