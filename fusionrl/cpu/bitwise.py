"""The mode --bitwise on a CPU: an engine and the trainers compute the same bits.

Both sides call these functions in place of faster ones: products whose rows do not depend on how many are computed
together, attention token by token as an engine decodes (`kernels.attend_decode`), norms of rounded sums, and log-probs
by one log-softmax of whole logits. `start` switches a process over; `register_engine` does the rest of an engine's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionrl.base.environment import DETERMINISTIC_CPU, MKL_MODE
from fusionrl.cpu import kernel_library

LEAST_ROWS = 8
"""Rows of a product. Libraries have other kernels for the fewest: MKL for up to 3 on AMD's CPUs, oneDNN for one."""
_TESTED_ROWS = (1, 2, 3, 17, 64)
_SIZES = ((64, 192), (256, 96), (1024, 512))  # of the weights of tested products: columns, rows
_kept: list[Any] = []  # torch drops functions whose library is collected


def is_on() -> bool:
    """Return whether `start` has switched this process over."""
    return bool(_kept)


def start() -> None:
    """Switch this process over, and those forked from it. Raises RuntimeError if its products are not exact."""
    if is_on():
        return
    torch.set_num_threads(1)  # two divide the rows, or a row's sum
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they replace others
        for name, function in (("mm", _product), ("bmm", _products), ("addmm", _product_and_bias)):
            library.impl(name, function, "CPU", allow_override=True)
    _kept.append(library)
    try:
        kernel_library.load()
    except kernel_library.CompileError as error:
        raise RuntimeError(f"--bitwise needs the kernels for this CPU; leave it out ({error})") from error
    if faults := product_faults(torch.mm):
        settings = (MKL_MODE, *DETERMINISTIC_CPU.items())
        raise RuntimeError(
            f"--bitwise: on this machine a row of a product depends on the other rows ({'; '.join(faults)});"
            f" export {' '.join('='.join(item) for item in settings)}, or leave out --bitwise"
        )


def product_faults(product: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """Say for each type, and so for each library, which numbers of rows change a row of `product`; [] if none does."""
    faults = []
    generator = torch.Generator().manual_seed(0)
    for dtype, library in ((torch.float32, "fp32, by MKL"), (torch.bfloat16, "bf16, by oneDNN")):
        wrong = set()
        for size, width in _SIZES:
            rows = torch.randn(2 * max(_TESTED_ROWS), size, generator=generator).to(dtype)
            weight = torch.randn(width, size, generator=generator).to(dtype)
            whole = product(rows, weight.t())
            for count in _TESTED_ROWS:
                for first in (0, 7):
                    part = slice(first, first + count)
                    if not torch.equal(product(rows[part], weight.t()), whole[part]):
                        wrong.add(count)
        if wrong:
            faults.append(f"{library}: {', '.join(map(str, sorted(wrong)))} rows")
    return faults


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [M, K] @ matrix [K, N]; fewer than `LEAST_ROWS` are computed with rows of zeros."""
    count = rows.size(0)
    if 0 < count < LEAST_ROWS:
        rows = F.pad(rows, (0, 0, 0, LEAST_ROWS - count))
    out = rows.new_empty(rows.size(0), matrix.size(1))
    torch.mm(rows, matrix, out=out)
    return out[:count]


def _products(rows: Tensor, matrices: Tensor) -> Tensor:
    """[B, M, K] @ [B, K, N], each by itself: torch takes this way for one batch of rows."""
    out = rows.new_empty(*rows.shape[:2], matrices.size(2))
    for part, matrix, to in zip(rows, matrices, out, strict=True):
        to.copy_(_product(part, matrix))
    return out


def _product_and_bias(bias: Tensor, rows: Tensor, matrix: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """A bias is added to the rounded product, as Megatron-core adds it."""
    product = _product(rows, matrix)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, temperature: float | Tensor, group: object
) -> Tensor:
    """Log-probs [N] fp32 of `targets`, as an engine computes them; arguments as of `chunked_log_probs`."""
    logits = F.linear(hidden, weight)
    if isinstance(group, torch.distributed.ProcessGroup) and group.size() > 1:
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        torch.distributed.all_gather(parts, logits.contiguous(), group=group)
        logits = torch.cat(parts, -1)
    logits = logits[:, :vocab_size].float()
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def register_engine() -> None:
    """Let SGLang's samplers, routers and experts of this process compute as the trainers do."""
    from sglang.srt.layers import sampler
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.moe import fused_moe_native, topk

    start()
    make_sampler = sampler.Sampler.__init__
    make_linear, multiply = ReplicatedLinear.__init__, ReplicatedLinear.forward
    choose = topk.fused_topk_native

    def init_sampler(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        make_sampler(self, *args, **kwargs)
        self.enable_deterministic = True  # log-probs by log_softmax

    def init_linear(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        make_linear(self, *args, **kwargs)
        self.is_router = str(kwargs.get("prefix")).endswith(".gate") and self.bias is None

    def forward(self: torch.nn.Module, x: Tensor, *args: object, **kwargs: object) -> object:
        if self.is_router:  # Megatron-core's is in fp32
            return F.linear(x.float(), self.weight.float()), None
        return multiply(self, x, *args, **kwargs)

    def choose_experts(
        hidden_states: Tensor,
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
        correction_bias: Tensor | None = None,
        scoring_func: str = "softmax",
    ) -> tuple[Tensor, Tensor]:
        """The softmax of the chosen logits is that of all, renormalised."""
        if correction_bias is not None or scoring_func != "softmax" or not renormalize:
            return choose(hidden_states, gating_output, topk, renormalize, correction_bias, scoring_func)
        scores, experts = torch.topk(gating_output.float(), topk, dim=-1)
        return scores.softmax(-1), experts.to(torch.int32)

    sampler.Sampler.__init__ = init_sampler
    ReplicatedLinear.__init__, ReplicatedLinear.forward = init_linear, forward
    topk.fused_topk_native = choose_experts
    fused_moe_native.moe_forward_native = expert_outputs


def expert_outputs(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
    """SGLang's `moe_forward_native` [T, h] in Megatron-core's order: an expert's weight before its second product, and
    the sums expert by expert. Ranks that divide the experts' rows add up each expert's output before that; the first
    one returns the sum and the others zeros, since the layer adds the ranks' outputs afterwards."""
    weights, experts, _ = topk_output
    out = torch.zeros_like(x)
    rows, parts = [], []
    for number in range(layer.num_experts):
        of_expert, places = (experts == number).nonzero(as_tuple=True)
        if of_expert.numel():
            gate, up = F.linear(x[of_expert], layer.w13_weight[number]).chunk(2, dim=-1)
            inner = (F.silu(gate) * up * weights[of_expert, places][:, None]).to(x.dtype)
            rows.append(of_expert)
            parts.append(F.linear(inner, layer.w2_weight[number]))
    if layer.moe_tp_size > 1 and parts:
        from sglang.srt.distributed import moe_tensor_model_parallel_all_reduce

        parts = list(moe_tensor_model_parallel_all_reduce(torch.cat(parts)).split([len(part) for part in parts]))
    if layer.moe_tp_rank == 0:
        for of_expert, part in zip(rows, parts, strict=True):
            out.index_add_(0, of_expert, part)
    return out
