"""Attempts: one of the --n-samples-per-prompt tries at a prompt, which may come back as several samples.

A generate function may return several samples for one (segments of a conversation, several agents). They share slime's
`Sample.rollout_id`. Statistics of a group, denominators of losses and accuracy count attempts, so that an attempt
weighs the same whatever the number of its samples.
"""

from collections.abc import Sequence

import numpy as np

from fusionrl.data.sample import Sample


def join_attempt(samples: Sequence[Sample], number: int | None) -> None:
    """Mark several samples as one attempt, unless their function has done so.

    number  of the attempt in its group; None: the prompt has no index, and any number that no other attempt has
    """
    if len(samples) > 1:
        number = -1 - id(samples[0]) if number is None else number
        for sample in samples:
            if sample.rollout_id is None:
                sample.rollout_id = number


def attempts_of(samples: Sequence[Sample]) -> np.ndarray:
    """[n] the attempt of each sample, numbered from 0 on in the order of their first samples."""
    numbers: dict[tuple[object, ...], int] = {}
    keys = ((s.group_index, s.rollout_id) if s.rollout_id is not None else (i,) for i, s in enumerate(samples))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def attempt_shares(attempts: np.ndarray) -> np.ndarray:
    """[n] 1 / (samples of the sample's attempt): weights under which every attempt counts once."""
    return 1.0 / np.bincount(attempts)[attempts] if len(attempts) else np.zeros(0)
