"""Log-probs and entropies of chosen tokens, without the logits of all tokens ever standing in memory.

The output layer is the widest of a small model. So hidden states are chosen before it (only those that
predict a token of the loss), it runs over chunks of them, and backward computes the logits of a chunk again.
A single chunk is kept instead. The vocabulary may be split over tensor-parallel ranks; no rank sees the
others' logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _ChunkedLogProbs(torch.autograd.Function):
    """hidden [N, h], weight [V/tp, h], targets [N] -> (log-probs [N], entropies [N]), both fp32.

    With logits x, lse = log sum exp(x), p = exp(x - lse) and H the entropy:
    log p(t) = x_t - lse, d/dx = 1[t] - p;  H = lse - sum p x, dH/dx = -p (x - lse + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        chunk_size: int,
        entropy_grad: bool,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        ctx.size, ctx.group, ctx.temperature, ctx.entropy_grad = size, group, temperature, entropy_grad
        rows = weight.size(0)
        ctx.num_valid = min(max(vocab_size - rank * rows, 0), rows)
        local = targets - rank * rows
        owned = (local >= 0) & (local < rows)
        local = local.clamp(0, rows - 1)
        chunks = list(range(0, hidden.size(0), chunk_size))
        lse = hidden.new_empty(hidden.size(0), dtype=torch.float32)
        entropy, log_probs = torch.empty_like(lse), torch.empty_like(lse)
        kept: Tensor | None = None
        for start in chunks:
            part = slice(start, start + chunk_size)
            logits = _logits(hidden[part], weight, temperature, ctx.num_valid)
            peak = logits.amax(-1)
            if size > 1:
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            exp = (logits - peak[:, None]).exp_()
            predicted = logits.gather(-1, local[part, None])[:, 0] * owned[part]
            sums = torch.stack([exp.sum(-1), torch.linalg.vecdot(exp, logits), predicted])
            if size > 1:
                dist.all_reduce(sums, group=group)
            lse[part] = peak + sums[0].log()
            entropy[part] = lse[part] - sums[1] / sums[0]
            log_probs[part] = sums[2] - lse[part]
            if len(chunks) == 1:
                kept = logits
        ctx.chunk_size = chunk_size
        ctx.save_for_backward(hidden, weight, local, owned, lse, entropy, kept)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, owned, lse, entropy, kept = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        starts = list(range(0, hidden.size(0), ctx.chunk_size))
        grad_weight: Tensor | None = None
        for start in starts:
            part = slice(start, start + ctx.chunk_size)
            logits = kept if kept is not None else _logits(hidden[part], weight, ctx.temperature, ctx.num_valid)
            scores = logits - lse[part, None]
            grad_log = grad_log_probs[part, None]
            if ctx.entropy_grad:
                surprise = scores + entropy[part, None]
                grad = scores.exp_().mul_(surprise.mul_(grad_entropy[part, None]).add_(grad_log)).neg_()
            else:
                grad = scores.exp_().mul_(-grad_log)
            grad.scatter_add_(-1, local[part, None], grad_log * owned[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if need_weight:
                if len(starts) == 1:
                    grad_weight = grad.t() @ hidden[part]
                else:
                    # bf16 sums over many chunks would lose the small ones.
                    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if grad_weight is None else grad_weight
                    grad_weight.addmm_(grad.t().float(), hidden[part].float())
        if need_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, num_valid: int) -> Tensor:
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    if num_valid < logits.size(-1):
        # Rows that pad the vocabulary are no tokens. Not -inf: its product with probability 0 is NaN.
        logits[:, num_valid:] = torch.finfo(torch.float32).min / 4
    return logits


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy_grad: bool = False,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution of `softmax(hidden @ weight.T / temperature)`.

    Args:
        hidden: [N, h], the same on all ranks of `group`; its gradient is this rank's part of the sum.
        weight: [V/tp, h], this rank's rows of the output layer.
        targets: [N] int64 token ids.
        vocab_size: number of real tokens; rows beyond it are padding.
        temperature: what logits are divided by.
        chunk_size: tokens whose logits stand in memory at a time.
        entropy_grad: whether the entropies are differentiable.
        group: tensor-parallel process group; None is one rank.

    Returns:
        (log_probs [N], entropies [N]) in nats, fp32, equal on all ranks of `group`.
    """
    return _ChunkedLogProbs.apply(hidden, weight, targets, vocab_size, temperature, chunk_size, entropy_grad, group)
