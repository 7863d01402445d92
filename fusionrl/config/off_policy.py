"""The loss of tokens that older weights sampled: the default under a pipeline whose trainers get ahead of the engines.

Decoupled PPO (arXiv 2505.24298): the ratio is taken to the proximal policy, the weights before the step, and clipped.
What lies between the proximal policy and the one that sampled, whose log-probs the engine gave, is a weight of each
token, truncated at --tis-clip. That is --use-tis, so the default is this flag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrl.config.run_parts import is_streamed
from fusionrl.pipeline.knobs import PIPELINES

if TYPE_CHECKING:
    from fusionrl.config.config import Config

# Fields that decide the default, in addition to the flag itself.
READS = (
    *("mode", "pipeline", "debug_train_only", "debug_rollout_only", "max_staleness", "update_weights_interval"),
    *("loss_type", "policy_loss", "custom_policy_loss_path", "custom_tis_function_path", "use_rollout_logprobs"),
    *("rejection_level", "tis_veto"),
)


def trains_older_tokens(config: Config) -> bool:
    """Return whether trainers get tokens that older weights sampled: by the bound, or by rollouts between pushes."""
    preset, flags = PIPELINES[config.run.pipeline], config.pipelining
    staleness = preset["max_staleness"] if flags.max_staleness is None else flags.max_staleness
    interval = preset["fetches_per_push"] if flags.update_weights_interval is None else flags.update_weights_interval
    return is_streamed(config) and (int(staleness) > 0 or int(interval) > 1)


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


def described(config: Config) -> str | None:
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
