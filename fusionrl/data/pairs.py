"""Pairs of answers for DPO: of each prompt the best and the worst."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from fusionrl.data.sample import Sample, Status


def best_and_worst(
    samples: Sequence[Sample], rewards: Sequence[float]
) -> tuple[list[Sample], list[float], list[float]]:
    """For each group whose rewards differ its first best and its first worst sample, side by side.

    Samples that are not trained on anyway are no one's partner. Without any pair, one of removed samples stands for
    them, so that there is a step, of which nothing is learnt.

    Returns:
        (samples, +1 for the chosen and -1 for the rejected, their rewards)
    """
    groups: dict[int | None, list[int]] = {}
    for i, sample in enumerate(samples):
        if not sample.remove_sample and sample.status not in (Status.FAILED, Status.ABORTED):
            groups.setdefault(sample.group_index, []).append(i)
    pairs = []
    for members in groups.values():
        best, worst = max(members, key=lambda i: rewards[i]), min(members, key=lambda i: rewards[i])
        if rewards[best] > rewards[worst]:
            pairs.append((best, worst))
    if not pairs:
        blank = [copy.copy(samples[0]), copy.copy(samples[0])]
        for sample in blank:
            sample.remove_sample = True
        return blank, [1.0, -1.0], [rewards[0]] * 2
    chosen = [i for pair in pairs for i in pair]
    return [samples[i] for i in chosen], [1.0, -1.0] * len(pairs), [rewards[i] for i in chosen]
