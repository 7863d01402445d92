"""Names of `slime.backends.megatron_utils.cp_utils`, for functions of --custom-tis-function-path and their like.

Here a function in the trainers is given whole responses on every context-parallel rank, so there is nothing to gather
or to slice: a function that was written for one rank's part of them runs unchanged, with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Values = TypeVar("Values", Tensor, list[float])


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int, *layout: object) -> Tensor:
    """Return a response's values unchanged, [response_length]; miles also passes the layout."""
    assert len(tensor) == response_length, f"{len(tensor)} values for {response_length} response tokens"
    return tensor


def slice_log_prob_with_cp(log_prob: Values, total_length: int, response_length: int, *layout: object) -> Values:
    """Return a response's values as they are, [response_length]."""
    assert len(log_prob) == response_length, f"{len(log_prob)} values for {response_length} response tokens"
    return log_prob


def slice_with_cp(tokens: Tensor, pad_value: float | Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return a sequence as it is."""
    return tokens


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    sample_denoms: Sequence[Tensor] | Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Return a function of values of all responses, [sum of lengths]: the sum of the samples' masked means.

    sample_denoms             what each sample's sum is divided by; default: its number of trained tokens
    calculate_per_token_loss  nothing is divided: the sum over trained tokens
    """
    denominators = [mask.sum() for mask in loss_masks] if sample_denoms is None else list(sample_denoms)

    def reduced(values: Tensor) -> Tensor:
        parts = values.split(list(response_lengths), dim=0)
        sums = [(part * mask).sum() for part, mask in zip(parts, loss_masks, strict=True)]
        if not calculate_per_token_loss:
            sums = [total / torch.clamp_min(count, 1) for total, count in zip(sums, denominators, strict=True)]
        return torch.stack(sums).sum()

    return reduced
