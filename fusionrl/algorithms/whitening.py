"""Whitening: mean 0 and deviation 1 over the trained tokens of a whole batch, however it is split over ranks."""

import torch
from torch import Tensor

EPSILON = 1e-8


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of `values` [N] where `mask` [N] is not 0 -> [3] float64.

    They add up over ranks and parts. A value that is not finite goes into the sums: see `whiten`.
    """
    picked = values[mask != 0].double()
    return torch.stack([picked.new_tensor(float(picked.numel())), picked.sum(), picked.square().sum()])


def whiten(values: Tensor, mask: Tensor, total: Tensor) -> Tensor:
    """`(x - mean) / sqrt(variance + 1e-8)` where `mask` is not 0, else 0; the variance is the unbiased one (n - 1).

    Args:
        values: [N].
        mask: [N].
        total: [3], the `moments` of the whole batch.

    Returns:
        [N], of the type of `values`. A batch of one token, or of equal ones, has no deviation: its values become 0, as
        far as rounding goes.

    Raises:
        ValueError: a value in the batch is not finite; on every rank at once, for all have the same `total`.
    """
    count, first, second = total.double().tolist()
    if not torch.isfinite(total).all():
        raise ValueError("advantages to be whitened are not finite: see the rewards, values and log-probs they are of")
    mean = first / max(count, 1.0)
    variance = max(second - count * mean**2, 0.0) / max(count - 1.0, 1.0)
    scaled = (values.double() - mean) / (variance + EPSILON) ** 0.5
    return torch.where(mask != 0, scaled, 0.0).to(values.dtype)
