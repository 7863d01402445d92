"""The loss of PPO's critic."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """`max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2` of each token.

    Source: the clip is from OpenAI Baselines' PPO2; arXiv 2005.12729, section 3, describes it.

    Args:
        values: [N] of the critic that is trained, with gradient.
        old_values: [N] of the critic when the advantages were computed.
        returns: [N] what the values should be.
        clip: how far a value may move from the old one; None: no bound.

    Returns:
        (loss [N], metrics [N]): `value_clip_fraction` is 1.0 where the clip took the gradient away, else 0.0.
    """
    free = (values - returns) ** 2
    if clip is None:
        return 0.5 * free, {"value_clip_fraction": torch.zeros_like(free)}
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns) ** 2
    return 0.5 * torch.maximum(free, bounded), {"value_clip_fraction": (bounded > free).to(free.dtype).detach()}
