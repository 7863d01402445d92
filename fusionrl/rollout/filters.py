"""Dynamic sampling filters: which finished groups are worth training on."""

from __future__ import annotations

from typing import Any

from fusionrl.data.sample import Sample
from fusionrl.rollout.types import DynamicFilterOutput


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: all right or all wrong carries no gradient (DAPO, arXiv 2503.14476, 3.2)."""
    rewards = [sample.get_reward_value(args) for sample in samples if sample.reward is not None]
    if not rewards:  # every sample failed or was aborted
        return DynamicFilterOutput(False, "unscored")
    if max(rewards) - min(rewards) > 1e-8:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"all_{rewards[0]:.1f}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """The same, but such a group is kept where without it more prompts would have to be sampled."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
