"""Products in which a row has the same bits whatever rows it is computed with, in engines on a CPU.

MKL takes other kernels for a few rows than for many. With `MKL_CBWR=AUTO,STRICT` (`base/environment.py`) a row of fp32
does not depend on the number of rows on Intel's CPUs, and on AMD's (EPYC) it does not from four rows on. A batch of
fewer rows is computed as one of `least_rows`, so the tokens of a request do not depend on the other requests.
"""

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional

from fusionrl.base.cpu_wing import DEPENDS_ON_BATCH

logger = logging.getLogger(__name__)
_MANY = 64  # rows of the products that others are compared with
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 63)
_MOST_PADDED = 8
_SIZES = ((64, 96), (200, 50), (256, 768))  # (inputs, outputs)


@functools.cache
def least_rows() -> int | None:
    """Return from how many rows on a row of a product of fp32 has the same bits; None: from more than a few.

    Computes a few products in this process, with its threads, in a few milliseconds.
    """
    generator = torch.Generator().manual_seed(0)
    least = 1
    for num_inputs, num_outputs in _SIZES:
        weight = torch.randn(num_outputs, num_inputs, generator=generator)
        rows = torch.randn(_MANY, num_inputs, generator=generator)
        whole = _linear(rows, weight)
        differing = [count for count in _COUNTS if not torch.equal(_linear(rows[:count], weight), whole[:count])]
        least = max([least, *(_COUNTS[_COUNTS.index(count) + 1] for count in differing[-1:] if count < _COUNTS[-1])])
        if differing[-1:] == [_COUNTS[-1]]:
            return None
    return least if least <= _MOST_PADDED else None


def register() -> None:
    """Let products of fewer rows than `least_rows` in this process be computed with as many."""
    least = least_rows()
    if least is None:
        logger.warning("Products: %s; run after run now and then samples another token", DEPENDS_ON_BATCH)
        return
    logger.info("Products: a row has the same bits in a batch of %d or more", least)
    if least == 1 or functional.linear is not _linear:
        return

    def padded(rows: Tensor) -> Tensor:
        return functional.pad(rows, (0, 0, 0, least - rows.size(0)))

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if rows.dim() != 2 or not 0 < (count := rows.size(0)) < least or rows.dtype is not torch.float32:
            return _linear(rows, weight, bias)
        return _linear(padded(rows), weight, bias)[:count]

    def matmul(rows: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        is_small = out is None and rows.dim() == other.dim() == 2 and 0 < rows.size(0) < least
        if not is_small or rows.dtype is not torch.float32:
            return _matmul(rows, other) if out is None else _matmul(rows, other, out=out)
        return _matmul(padded(rows), other)[: rows.size(0)]

    functional.linear = linear  # type: ignore[assignment]  # SGLang passes these arguments alone
    torch.matmul = matmul


_linear, _matmul = functional.linear, torch.matmul
