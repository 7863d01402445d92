"""A reward by reasoning-gym's own verifier, for rows written by tools/make_reasoning_data.py.

    --custom-rm-path plugins.rewards.reasoning_gym_reward.reward --metadata-key metadata

`reward` is the verifier's own score; `exact_reward` is 1 for a full score and 0 for less. Several verifiers give part
of the score to an answer that only contains the right one ("50" for "5"), and a policy soon learns to write such.

A row's metadata carries `source_dataset` (the name of the data set) and `entry` (what its verifier needs:
at least `answer`). The last number of the response is handed to the verifier as the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from plugins.rewards.last_number import last_number


@cache
def verifier(source_dataset: str) -> Callable[..., float]:
    """The data set's `score_answer`; raises `ValueError` where reasoning-gym has none of that name."""
    # Imported here: it takes seconds, and a run that uses another reward should not need the package.
    try:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn
    except ImportError as error:
        raise ValueError(
            "the reward needs the package reasoning-gym; scripts/setup-env.sh examples installs it"
        ) from error
    if source_dataset not in DATASETS:
        raise ValueError(f"metadata.source_dataset is {source_dataset!r}, which reasoning-gym does not know")
    return get_score_answer_fn(source_dataset)


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """The verifier's score in [0, 1] of the last number in `sample.response`; 0.0 where there is no number.

    Raises `ValueError` where the sample's metadata lacks `source_dataset` or `entry`.
    """
    metadata = sample.metadata or {}
    missing = [key for key in ("source_dataset", "entry") if key not in metadata]
    if missing:
        raise ValueError(
            f"the sample's metadata lacks {', '.join(missing)}; --metadata-key must name the column that "
            "tools/make_reasoning_data.py wrote"
        )
    answer = last_number(sample.response or "")
    if answer is None:
        return 0.0
    return float(verifier(metadata["source_dataset"])(answer=answer, entry=metadata["entry"]))


async def exact_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """1.0 where the verifier gives the full score, else 0.0; raises as `reward`."""
    return float(await reward(args, sample, **kwargs) >= 1.0)
