"""The reward of `tools/bench/buffer.py`, in a file of its own: the Buffer that is measured imports it, and no more."""

from __future__ import annotations

from typing import Any


def score(args: Any, sample: Any, *, rollout_id: int, evaluation: bool) -> Any:
    """Set a reward that costs nothing and differs within a group."""
    sample.reward = float(sample.index % 2)
    return sample
