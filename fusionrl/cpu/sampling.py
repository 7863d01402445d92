"""Sampling of tokens on a CPU with one random number a request, put into SGLang from outside.

`torch.multinomial` draws a random number for each token of the vocabulary and request, which takes a good part of a
decode step. `draw` inverts the distribution function.
"""

import torch
from torch import Tensor


def draw(probs: Tensor) -> Tensor:
    """Draw a token of each row of `probs` [B, V], non-negative, which need not sum to 1 → [B] int64.

    Sums are float64: a token of probability 1e-12 is drawn as often as it should be. One of probability 0 never is.
    If a row is not a distribution, as after an overflow, `torch.multinomial` raises RuntimeError, as SGLang expects.
    """
    ends = probs.cumsum(1, dtype=torch.float64)
    totals = ends[:, -1:]
    if not (torch.isfinite(totals) & (totals > 0)).all():
        return torch.multinomial(probs, num_samples=1)[:, 0]
    targets = torch.rand(len(probs), 1, dtype=torch.float64) * totals
    below = torch.nextafter(totals, torch.zeros_like(totals))  # where rounding has brought a target to the end
    return torch.searchsorted(ends, targets.minimum(below), right=True)[:, 0]


def register() -> None:
    """Let SGLang's sampler of this process, and of those forked from it, use `draw`."""
    from sglang.srt.layers import sampler

    original = sampler.sampling_from_probs_torch

    def sampling_from_probs(
        probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        if sampling_seed is not None or probs.device.type != "cpu":
            return original(probs, sampling_seed, positions)
        return draw(probs).to(torch.int32)

    sampler.sampling_from_probs_torch = sampling_from_probs
