"""Warnings of settings that are allowed but probably not meant, shown with the plan and when a run starts."""

from __future__ import annotations

from fusionrl.checks.algorithm import algorithm_warnings
from fusionrl.checks.chat import chat_warnings
from fusionrl.checks.disk_space import disk_warnings
from fusionrl.checks.effects import effect_warnings
from fusionrl.config.config import Config
from fusionrl.config.hooks import flag_of
from fusionrl.config.off_policy import needs_correction
from fusionrl.config.run_parts import has_policy_loss, is_streamed
from fusionrl.config.slime_flags import slime_notes
from fusionrl.plan.open_files import open_file_warnings
from fusionrl.plan.pipeline_knobs import knobs_of
from fusionrl.plan.plan import Plan


def run_warnings(config: Config, plan: Plan) -> list[str]:
    """Return those of the flags, and those of a run on this machine."""
    return [*flag_warnings(config), *open_file_warnings(config, plan), *disk_warnings(config, plan)]


def flag_warnings(config: Config) -> list[str]:
    """One text a finding, with flag and cure."""
    return [
        *algorithm_warnings(config),
        *effect_warnings(config),
        *staleness_warnings(config),
        *context_warnings(config),
        *agent_warnings(config),
        *chat_warnings(config),
        *slime_notes(config.passthrough.slime),
    ]


def context_warnings(config: Config) -> list[str]:
    """Warn of a function in slime's form under context parallelism, which it may or may not support."""
    size = config.model.context_parallel_size
    fields = ("custom_tis_function_path", "custom_pg_loss_reducer_function_path")
    custom_fields = [name for name in fields if getattr(config.algorithm, name) is not None]
    if size == 1 or not custom_fields or not has_policy_loss(config):
        return []
    return [
        f"{flag_of(name)} {getattr(config.algorithm, name)}: with --context-parallel-size {size} each of the {size}"
        " context ranks calls it with whole responses; it must not sum over these ranks itself, or every token counts"
        f" {size} times"
        for name in custom_fields
    ]


def agent_warnings(config: Config) -> list[str]:
    """A text where agents get other answers than they ask for."""
    if not config.rollout.agent_free_sampling:
        return []
    return [
        "--agent-free-sampling: requests of agents with a forced tool_choice, a response_format or a grammar are"
        " answered by free sampling; an answer may lack the call, or not be JSON, and the agent must cope with that"
    ]


def staleness_warnings(config: Config) -> list[str]:
    """A text where tokens of older weights are trained on, and the loss does not know of it."""
    is_meant = needs_correction(config) and has_policy_loss(config) and not config.algorithm.use_tis
    if not is_streamed(config) or not is_meant or config.rollout.rollout_batch_size is None:
        return []
    try:
        knobs = knobs_of(config, None, 1)
    except ValueError:  # an error tells it
        return []
    staleness, interval = knobs.max_staleness, knobs.fetches_per_push
    if not staleness and interval > 1:
        return [
            f"--pipeline {config.run.pipeline}: the later of the {interval} rollouts between two pushes are trained by"
            " weights that have moved, and the loss does not correct for it; add --use-tis (decoupled PPO) or"
            " --use-rollout-logprobs"
        ]
    if not staleness:
        return []
    return [
        f"--pipeline {config.run.pipeline}: tokens may be {staleness} versions old, and the loss takes them for"
        " tokens of the newest weights; add --use-tis (decoupled PPO) or --use-rollout-logprobs"
    ]
