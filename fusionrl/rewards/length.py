"""Rewards for short responses, added to what is trained on and to nothing that is reported as the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

    from fusionrl.config.rollout import RewardGroup


def soft_overlong_punishment(length: int, max_length: int, buffer_length: int) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), in [-1, 0]; lengths in tokens.

    0 up to max_length - buffer_length, then falling linearly to -1 at max_length, and -1 beyond. Raises ValueError if
    the buffer is empty or longer than max_length.
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(f"the overlong buffer of {buffer_length} tokens must lie between 1 and {max_length}")
    return max(-1.0, min(0.0, (max_length - buffer_length - length) / buffer_length))


def length_penalty(length: int, max_length: int, coef: float) -> float:
    """A price for each token: -coef at max_length tokens, half of it at half the length."""
    return -coef * length / max_length


def length_reward(length: int, max_length: int | None, flags: RewardGroup | Namespace) -> float:
    """Return what --length-penalty-coef, --overlong-buffer-len and --overlong-penalty-factor add to the reward of a
    response of `length` tokens, at most 0; 0 without any."""
    if max_length is None:  # only in runs without these flags, as the checks see to
        return 0.0
    added = length_penalty(length, max_length, flags.length_penalty_coef)
    if flags.overlong_buffer_len is not None:
        overlong = soft_overlong_punishment(length, max_length, flags.overlong_buffer_len)
        added += flags.overlong_penalty_factor * overlong
    return added
