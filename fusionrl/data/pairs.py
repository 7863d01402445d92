"""Pairs of answers for DPO: of each prompt the best and the worst."""

from __future__ import annotations

from collections.abc import Sequence

from fusionrl.data.sample import Sample, is_trained_on


def best_and_worst(samples: Sequence[Sample], rewards: Sequence[float]) -> list[tuple[int, int]]:
    """For each group whose rewards differ the positions of its first best and its first worst sample.

    Samples that are not trained on anyway are no one's partner.
    """
    groups: dict[int | None, list[int]] = {}
    for i, sample in enumerate(samples):
        if is_trained_on(sample):
            groups.setdefault(sample.group_index, []).append(i)
    pairs = [
        (max(members, key=lambda i: rewards[i]), min(members, key=lambda i: rewards[i])) for members in groups.values()
    ]
    return [(best, worst) for best, worst in pairs if rewards[best] > rewards[worst]]
