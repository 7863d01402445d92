"""The parts of a run (engines, trainers) and their work, by the mode and the --debug-… flags."""

from __future__ import annotations

from fusionrl.algorithms.estimators import ESTIMATORS, Estimator
from fusionrl.config.config import Config
from fusionrl.config.groups import AlgorithmGroup, RolloutGroup


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


def reads_prompts(rollout_function_path: str, custom_generate_function_path: str | None) -> bool:
    """Return whether a user's function makes tokens of the prompts: it may want lists of messages as they are."""
    is_default = rollout_function_path == RolloutGroup().rollout_function_path
    return not is_default or custom_generate_function_path is not None


def asks_for_routing(config: Config) -> bool:
    """Return whether the default rollout asks the engines which experts they chose: no function or file tells it."""
    separate = (
        config.rollout.custom_generate_function_path,
        config.reward.custom_convert_samples_to_train_data_path,
        config.run.load_debug_rollout_data,
    )
    is_default = config.rollout.rollout_function_path == RolloutGroup().rollout_function_path
    return config.algorithm.use_rollout_routing_replay and is_default and not any(separate)
