"""Log-probs and entropies of chosen tokens, without their logits over the whole vocabulary ever standing in memory.

The output layer is the widest of a small model. So hidden states are chosen before it (only those that predict a token
of the loss), and it runs over blocks of the vocabulary, all tokens at a time: the softmax is summed up as they go by
(Milakov and Gimelshein, arXiv 1805.02867), and backward computes the logits of a block again. The first blocks are kept
instead, as many as fit into a budget. Blocks of the vocabulary and not of tokens: each product is large in all three
sizes, the weights are read once a pass, and the gradient of a block's weights is done when the block is.

The vocabulary may be split over tensor-parallel ranks; no rank sees the others' logits.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fusionrl.plan.memory.trainer import block_sizes


class _ChunkedLogProbs(torch.autograd.Function):
    """hidden [N, h], weight [V/tp, h], targets [N] -> (log-probs [N], entropies [N]), both fp32.

    With logits x, lse = log sum exp(x), p = exp(x - lse) and H the entropy:
    log p(t) = x_t - lse, d/dx = 1[t] - p;  H = lse - sum p x, dH/dx = -p (x - lse + H).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float | Tensor,
        width: int,
        num_kept: int,
        entropy_grad: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        """Of blocks of `width` rows the first `num_kept` save their logits for backward, which computes the others."""
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        # No block holds the rows that pad the vocabulary.
        num_valid = min(max(vocab_size - rank * weight.size(0), 0), weight.size(0))
        local = targets - rank * weight.size(0)
        buffer, exp_buffer = (hidden.new_empty(hidden.size(0), width, dtype=torch.float32) for _ in range(2))
        # Not -inf, which a rank of padding alone would keep: -inf - -inf is NaN.
        peak = hidden.new_full((hidden.size(0),), torch.finfo(torch.float32).min, dtype=torch.float32)
        # sum exp(x - peak), sum x exp(x - peak), x of the target
        sums = hidden.new_zeros(3, hidden.size(0), dtype=torch.float32)
        block_logits: list[Tensor] = []
        for start in range(0, num_valid, width):
            block = weight[start : min(start + width, num_valid)]
            out = torch.empty_like(buffer) if len(block_logits) < num_kept else buffer
            logits = _logits(hidden, block, temperature, out[:, : len(block)])
            if len(block_logits) < num_kept:
                block_logits.append(logits)
            higher = torch.maximum(peak, logits.amax(-1))
            sums[:2] *= (peak - higher).exp_()
            peak = higher
            exp = torch.sub(logits, peak[:, None], out=exp_buffer[:, : len(block)]).exp_()
            column, inside = _columns(local, start, len(block))
            sums[0] += exp.sum(-1)
            sums[1] += exp.mul_(logits).sum(-1)
            sums[2] += logits.gather(-1, column)[:, 0] * inside
        if size > 1:
            local_peak = peak.clone()
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            sums[:2] *= (local_peak - peak).exp_()
            dist.all_reduce(sums, group=group)
        lse = peak + sums[0].log()
        entropy = lse - sums[1] / sums[0]
        ctx.num_valid, ctx.width, ctx.temperature, ctx.entropy_grad = num_valid, width, temperature, entropy_grad
        ctx.save_for_backward(hidden, weight, local, lse, entropy, *block_logits)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return sums[2] - lse, entropy

    @staticmethod
    def backward(ctx: FunctionCtx, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden [N, h] and weight [V/tp, h], block by block; None for the other inputs."""
        hidden, weight, local, lse, entropy, *block_logits = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        buffers = [hidden.new_empty(len(hidden), ctx.width, dtype=torch.float32) for _ in range(1 + ctx.entropy_grad)]
        offset = -(grad_log_probs + entropy * grad_entropy)[:, None] if ctx.entropy_grad else -grad_log_probs[:, None]
        for i, start in enumerate(range(0, ctx.num_valid, ctx.width)):
            block = weight[start : min(start + ctx.width, ctx.num_valid)]
            out = buffers[0][:, : len(block)]
            logits = block_logits[i] if i < len(block_logits) else _logits(hidden, block, ctx.temperature, out)
            scores = torch.sub(logits, lse[:, None], out=out)
            factor = offset
            if ctx.entropy_grad:
                factor = torch.addcmul(offset, scores, -grad_entropy[:, None], out=buffers[1][:, : len(block)])
            grad = scores.exp_().mul_(factor)
            column, inside = _columns(local, start, len(block))
            grad.scatter_add_(-1, column, (grad_log_probs * inside)[:, None])
            _divide(grad, ctx.temperature)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                # Blocks are summed in fp32 whatever the weights are.
                if grad.dtype == torch.float32:
                    grad_hidden.addmm_(grad, block)
                else:
                    grad_hidden += grad @ block
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[start : start + len(block)])
        if grad_weight is not None:
            grad_weight[ctx.num_valid :] = 0
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _logits(hidden: Tensor, block: Tensor, temperature: float | Tensor, out: Tensor) -> Tensor:
    """`hidden @ block.T / temperature` in `out`, fp32."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, block.t(), out=out)
    else:
        out.copy_(hidden @ block.t())
    return _divide(out, temperature)


def _divide(values: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide each row of `values` in place by its temperature."""
    if isinstance(temperature, Tensor):
        return values.div_(temperature[:, None])
    return values if temperature == 1.0 else values.div_(temperature)


def _columns(local: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """(column [N, 1] of each target in a block of the vocabulary, whether it is there [N]); elsewhere any column."""
    column = local - start
    return column.clamp(0, count - 1)[:, None], (column >= 0) & (column < count)


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    entropy_grad: bool = False,
    group: object = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution of `softmax(hidden @ weight.T / temperature)`.

    hidden        [N, h], the same on all ranks of `group`; its gradient is this rank's part of the sum
    weight        [V/tp, h], this rank's rows of the output layer
    targets       [N] int64 token ids
    vocab_size    number of real tokens; rows beyond it are padding
    temperature   what logits are divided by: one number, or [N]
    chunk_size    how many logits a block holds: as many as those of so many tokens over the whole vocabulary; as many
                  again are kept for backward. None is `BLOCK_BYTES` (more where a block would be narrower than h) and
                  `KEPT_BYTES` of `plan.memory.trainer`. There are two buffers of a block's size.
    entropy_grad  whether the entropies are differentiable
    group         tensor-parallel process group; None is one rank

    Returns (log_probs [N], entropies [N]) in nats, fp32, equal on all ranks of `group`.
    """
    width, num_kept = block_sizes(hidden.size(0), hidden.size(1), weight.size(0), chunk_size)
    num_kept = num_kept if torch.is_grad_enabled() else 0
    log_probs, entropies = _ChunkedLogProbs.apply(
        hidden, weight, targets, vocab_size, temperature, width, num_kept, entropy_grad, group
    )
    if hidden.device.type == "cpu":
        from fusionrl.cpu import bitwise

        if bitwise.is_on():  # these have the gradient, which a value of 0 adds
            with torch.no_grad():
                exact = bitwise.token_log_probs(hidden, weight, targets, vocab_size, temperature, group)
            log_probs = exact + (log_probs - log_probs.detach())
    return log_probs, entropies
