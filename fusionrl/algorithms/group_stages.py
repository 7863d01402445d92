"""Group stages of the estimators: a value for each sample, measured against the others of its prompt.

A group stage runs in the Buffer, where all groups are known. Nothing here needs torch: the Buffer and the driver
import it.
"""

import math

import numpy as np

from fusionrl.algorithms.groups import SampleBatch

EPSILON = 1e-6


def grpo(batch: SampleBatch) -> np.ndarray:
    """`(r - mean(group)) / (std(group) + 1e-6)`, with the unbiased deviation (n - 1) -> [n].

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    centered = batch.centered()
    group, counts = batch.groups
    variance = np.bincount(group, weights=batch.shares * centered**2) / np.maximum(counts - 1, 1)
    return centered / (np.sqrt(variance) + EPSILON)[group]


def dr_grpo(batch: SampleBatch) -> np.ndarray:
    """`r - mean(group)` -> [n].

    Sources: Dr. GRPO (arXiv 2503.20783); REINFORCE++ (arXiv 2501.03262), its variant with a baseline, whitens it.
    """
    return batch.centered()


def rloo(batch: SampleBatch) -> np.ndarray:
    """`r_i - sum_{j != i} r_j / (K - 1)` in a group of K -> [n]; 0 in a group of one.

    Source: RLOO (arXiv 2402.14740). The same as `K / (K - 1) * (r_i - mean(group))`.
    """
    sizes = batch.group_sizes
    return batch.centered() * sizes / np.maximum(sizes - 1, 1)


def leave_one_out(values: np.ndarray, group_index: np.ndarray) -> np.ndarray:
    """The mean of the others' `values` in each sample's group: [n], [n] -> [n].

    A NaN is a sample without a value (none of its tokens is trained on) and is counted in no mean. A sample that
    is left alone so is its own baseline; that of a lone NaN is 0, and belongs to no token.
    """
    values = np.asarray(values, np.float64)
    known = ~np.isnan(values)
    _, group = np.unique(group_index, return_inverse=True)
    filled = np.where(known, values, 0.0)
    group_rest = np.bincount(group, filled)[group] - filled
    count = np.bincount(group, known)[group] - known
    return np.where(count > 0, group_rest / np.maximum(count, 1), filled)


def remax(batch: SampleBatch) -> np.ndarray:
    """`r - b`, b the reward of the greedy answer to the same prompt -> [n]; a group of one is as good as any.

    Source: ReMax (arXiv 2310.10505).

    Raises:
        ValueError: no baselines, or one that is not finite.
    """
    if batch.baselines is None or np.shape(batch.baselines) != batch.rewards.shape:
        raise ValueError(f"ReMax needs the reward of a greedy answer for each of {batch.rewards.size} samples")
    baselines = np.asarray(batch.baselines, np.float64)
    if not np.isfinite(baselines).all():
        bad = int(np.flatnonzero(~np.isfinite(baselines))[0])
        raise ValueError(f"the greedy answer's reward {baselines[bad]} for sample {bad} is not finite")
    return batch.rewards - baselines


def opo(batch: SampleBatch) -> np.ndarray:
    """`r - sum_j l_j r_j / sum_j l_j` over the group, with l the lengths -> [n]: the baseline of least variance.

    The squared norm of a sample's gradient is taken to grow with its length. Source: OPO (arXiv 2505.23585).

    Raises:
        ValueError: no lengths, or one that is negative.
    """
    lengths = None if batch.lengths is None else np.asarray(batch.lengths, np.float64)
    if lengths is None or lengths.shape != batch.rewards.shape or not (lengths >= 0).all():
        raise ValueError(f"OPO weighs {batch.rewards.size} rewards by their samples' lengths >= 0, not by {lengths}")
    return batch.centered(lengths)


def pass_at_k_advantages(batch: SampleBatch) -> np.ndarray:
    """Mean advantage of each sample over all teams of k samples of its group -> [n], which trains pass@k.

    An attempt of several samples counts as one: it is right if all of its samples are, and each has its advantage.
    A team's reward is 1 if one of its answers is right, else 0; its advantage is the reward normalised by mean and
    deviation over all teams. With c of n samples right, `p = 1 - C(n - c, k) / C(n, k)` and
    `s = sqrt(p (1 - p))`, a right sample has `(1 - p) / s`, a wrong one
    `(1 - p - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / s`.
    Source: "Pass@k Training" (arXiv 2508.10751), its analytical derivation.

    Where all teams fare alike (s = 0) and in a group smaller than k, which has no team, the advantages are 0.

    Raises:
        ValueError: a reward that is neither 1 (right) nor 0 or -1 (wrong), k below 1, or no group of k samples.
    """
    rewards, k = batch.rewards, batch.k
    bad = np.flatnonzero(~np.isin(rewards, (1.0, 0.0, -1.0)))
    if bad.size:
        raise ValueError(
            f"reward {rewards[bad[0]]} of sample {bad[0]}: pass@k takes 1 for a right answer and 0 or -1 for a wrong"
        )
    group, counts = batch.groups
    if k < 1 or (counts.size and k > batch.largest_group):
        raise ValueError(
            f"pass@{k} advantages of groups of at most {batch.largest_group} samples: k must be from 1 to "
            "--n-samples-per-prompt"
        )
    # [n] whether the sample's attempt is right: none of its samples is wrong
    right = np.bincount(batch.attempt, rewards != 1.0, minlength=1)[batch.attempt] == 0
    num_right = np.rint(np.bincount(group, right * batch.shares)).astype(int)
    advantages = np.zeros_like(rewards)
    for g, (n, c) in enumerate(zip(counts.tolist(), num_right.tolist(), strict=True)):
        if n < k or c == 0 or n - c < k:
            continue
        missed = math.comb(n - c, k) / math.comb(n, k)  # 1 - p
        deviation = math.sqrt(missed * (1.0 - missed))
        wrong = missed - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
        advantages[group == g] = np.where(right[group == g], missed, wrong) / deviation
    return advantages
