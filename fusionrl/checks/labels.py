"""The check of labels by the built-in reward of a run or of an evaluation set."""

from __future__ import annotations

from collections.abc import Mapping

from fusionrl.config.config import Config
from fusionrl.config.groups import DataGroup, RolloutGroup
from fusionrl.rewards.labels import BUDGET_S, LabelCheck


def run_label_check(config: Config, budget_s: float = BUDGET_S) -> LabelCheck | None:
    """Return the check of the rows of --prompt-data; None where no built-in reward grades with their labels."""
    reward, rollout = config.reward, config.rollout
    has_own_source = config.data.data_source_path != DataGroup().data_source_path
    is_own = has_own_source or rollout.rollout_function_path != RolloutGroup().rollout_function_path
    if is_own or config.run.load_debug_rollout_data:
        return None
    path = rollout.custom_generate_function_path
    return label_check(config, reward.rm_type, reward.custom_rm_path, generate_path=path, budget_s=budget_s)


def label_check(
    config: Config,
    rm_type: str | None,
    custom_rm_path: str | None,
    *,
    generate_path: str | None,
    overrides: Mapping[str, object] | None = None,
    budget_s: float = BUDGET_S,
) -> LabelCheck | None:
    """Return the check for a reward, as flags or an evaluation set name it; None: it is a user's, or there is none.

    generate_path  a user's generate function, which may give the samples other labels: then problems are warnings
    """
    if custom_rm_path is not None or config.run.mode == "sft":
        return None
    is_warning = generate_path is not None or bool(config.rollout.rollout_sample_hook_path)
    return LabelCheck(rm_type, overrides=overrides, is_warning=is_warning, budget_s=budget_s)
