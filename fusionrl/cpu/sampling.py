"""Sampling of tokens on a CPU with one random number a request, put into SGLang from outside.

`torch.multinomial` draws a random number for each token of the vocabulary and request, which takes a good part of a
decode step. `draw` inverts the distribution function.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 512
"""Tokens whose probabilities are first summed; the distribution is looked through in one block alone."""
_SMALL = 1024
"""Tokens of a vocabulary that is looked through as a whole."""
_FEW = 1024
"""Probabilities of a batch up to which `torch.multinomial` is as fast."""


def draw(probs: Tensor) -> Tensor:
    """Draw a token of each row of `probs` [B, V], non-negative, which need not sum to 1 → [B] int64.

    Sums are float64: a token of probability 1e-12 is drawn as often as it should be. One of probability 0 never is.
    If a row is not a distribution, as after an overflow, `torch.multinomial` raises RuntimeError, as SGLang expects.
    """
    size = probs.size(1)
    if size <= _SMALL:
        ends = probs.cumsum(1, dtype=torch.float64)
        if not _are_sums(ends):
            return torch.multinomial(probs, num_samples=1)[:, 0]
        return torch.searchsorted(ends, _target(ends), right=True)[:, 0]
    num_blocks = size // _BLOCK
    sums = probs[:, : num_blocks * _BLOCK].unflatten(1, (num_blocks, _BLOCK)).sum(-1, dtype=torch.float64)
    if num_blocks * _BLOCK < size:
        sums = torch.cat((sums, probs[:, num_blocks * _BLOCK :].sum(-1, dtype=torch.float64, keepdim=True)), 1)
    ends = sums.cumsum(1)  # [B, blocks]
    if not _are_sums(ends):
        return torch.multinomial(probs, num_samples=1)[:, 0]
    target = _target(ends)
    block = torch.searchsorted(ends, target, right=True)  # the first whose end is beyond the target: its sum is not 0
    target -= ends.gather(1, block) - sums.gather(1, block)
    tokens = block * _BLOCK + torch.arange(_BLOCK)  # [B, block]
    inside = probs.gather(1, tokens.clamp(max=size - 1)).double().masked_fill_(tokens >= size, 0.0).cumsum(1)
    # The same probabilities, summed in another order: the last bit may differ.
    place = torch.searchsorted(inside, _below(target.clamp_(min=0.0), inside[:, -1:]), right=True)
    return (block * _BLOCK + place)[:, 0]


def _are_sums(ends: Tensor) -> bool:
    """Return whether the last column holds sums of distributions."""
    totals = ends[:, -1]
    return bool((torch.isfinite(totals) & (totals > 0)).all())


def _target(ends: Tensor) -> Tensor:
    """A random number below the last of each row's ends [B, 1]."""
    totals = ends[:, -1:]
    return _below(torch.rand(len(ends), 1, dtype=torch.float64) * totals, totals)


def _below(target: Tensor, end: Tensor) -> Tensor:
    """`target`, or the number before `end` where rounding has brought it there."""
    return torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))


def register() -> None:
    """Let SGLang's sampler of this process, and of those forked from it, use `draw`. Idempotent."""
    from sglang.srt.layers import sampler

    original = sampler.sampling_from_probs_torch
    if getattr(original, "is_draw", False):
        return

    def sampling_from_probs(
        probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        if sampling_seed is not None or probs.device.type != "cpu" or probs.numel() <= _FEW:
            return original(probs, sampling_seed, positions)
        return draw(probs).to(torch.int32)

    sampling_from_probs.is_draw = True  # type: ignore[attr-defined]
    sampler.sampling_from_probs_torch = sampling_from_probs
