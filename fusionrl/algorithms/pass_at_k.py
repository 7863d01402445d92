"""Advantages that train pass@k: the chance that at least one of k answers is right."""

from __future__ import annotations

import math

import numpy as np

from fusionrl.algorithms.groups import SampleBatch


def pass_at_k_advantages(batch: SampleBatch) -> np.ndarray:
    """Mean advantage of each sample over all teams of k samples of its group -> [n].

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
