"""The parts of a run (engines, trainers) and their work, by the mode and the --debug-… flags."""

from __future__ import annotations

from fusionrl.config.config import Config
from fusionrl.config.groups import RolloutGroup


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
    is_sft = algorithm.loss_type == "sft_loss" and algorithm.advantage_estimator != "ppo"
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


def asks_for_routing(config: Config) -> bool:
    """Return whether the default rollout asks the engines which experts they chose: no function or file tells it."""
    others = (
        config.rollout.custom_generate_function_path,
        config.reward.custom_convert_samples_to_train_data_path,
        config.run.load_debug_rollout_data,
    )
    is_default = config.rollout.rollout_function_path == RolloutGroup().rollout_function_path
    return config.algorithm.use_rollout_routing_replay and is_default and not any(others)
