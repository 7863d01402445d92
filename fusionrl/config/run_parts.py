"""The parts of a run (engines, trainers) and their work, by the mode and the --debug-… flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrl.algorithms.estimators import ESTIMATORS, Estimator
from fusionrl.pipeline.knobs import IN_TURN

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
