"""Dynamic sampling filters: which finished groups are worth training on."""

from argparse import Namespace

import numpy as np

from fusionrl.data.sample import Sample, lacks_reward, reward_value
from fusionrl.data.train_batch import attempt_shares, attempts_of
from fusionrl.rollout.types import DynamicFilterOutput


def check_reward_nonzero_std(args: Namespace, samples: list[Sample], **kwargs: object) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: all right or all wrong carries no gradient (DAPO, arXiv 2503.14476, 3.2)."""
    rewards = _rewards(args, samples)
    if not rewards:  # every sample failed or was aborted
        return DynamicFilterOutput(False, "unscored")
    if max(rewards) - min(rewards) > 1e-8:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"all_{rewards[0]:.1f}")


def check_reward_nonzero_std_with_fallback(
    args: Namespace, samples: list[Sample], **kwargs: object
) -> DynamicFilterOutput:
    """The same, but such a group is kept where without it more prompts would have to be sampled."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output


def check_accuracy_in_range(args: Namespace, samples: list[Sample], **kwargs: object) -> DynamicFilterOutput:
    """Keep a group whose share of right attempts is in --accuracy-lower-bound … --accuracy-upper-bound, ends included.

    Right is a reward above 0; samples without a reward do not count. PRIME's online prompt filtering (arXiv 2502.01456;
    0.2 to 0.8 in the authors' launch scripts): neither what is too easy nor what is too hard, and about as many right
    answers as wrong ones for the reward model.
    """
    rewards = _rewards(args, samples)
    if not rewards:  # every sample failed or was aborted
        return DynamicFilterOutput(False, "unscored")
    shares = attempt_shares(attempts_of(_scored(samples)))
    accuracy = float(np.dot(shares, np.array(rewards) > 0) / shares.sum())
    if accuracy < args.accuracy_lower_bound:
        return DynamicFilterOutput(False, "too_hard")
    if accuracy > args.accuracy_upper_bound:
        return DynamicFilterOutput(False, "too_easy")
    return DynamicFilterOutput(True)


def _rewards(args: Namespace, samples: list[Sample]) -> list[float]:
    return [reward_value(sample.reward, args.reward_key, "--reward-key") for sample in _scored(samples)]


def _scored(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.reward is not None and not lacks_reward(sample)]
