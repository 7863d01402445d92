"""Kernels of a transformer on a CPU (`kernels.c`), as functions of tensors.

torch does each of these in several operations, each of which passes over memory and takes microseconds to begin; on
small tensors that is most of their time. The functions here take tensors in a CPU's memory, as `fit` tells, all of fp32
or all of bf16, and write new ones of that type; they compute in fp32. Without a library (`kernel_library.py`)
`fit` returns False, and callers use torch.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from fusionrl.cpu import bitwise, kernel_library

logger = logging.getLogger(__name__)

_pointer, _long, _float = c_void_p, c_int64, c_float
# Of each function: what it returns and takes, before what all of them take: `half` and the number of threads.
_ARGUMENTS = {
    "rms_norm": (None, [_pointer, _long, *[_pointer] * 5, _long, _long, _float]),
    "rms_norm_backward": (c_int, [_pointer, _long, *[_pointer] * 5, _long, _long]),
    "swiglu": (None, [_pointer, _pointer, _long, _long]),
    "swiglu_backward": (None, [*[_pointer] * 3, _long, _long]),
    "rotate": (
        c_int,
        [_pointer, _long, _long, *[_pointer] * 2, _long, _long, _pointer, _float, _pointer, *[_long] * 4],
    ),
    "rotate_both": (c_int, [*[_pointer, _long, _long, _pointer] * 2, _pointer, _long, _pointer, _long, _long, _long]),
    "attend_decode": (c_int, [_pointer, _long, *[_pointer] * 3, *[_long] * 3, *[_pointer] * 4, *[_long] * 8, _float]),
    "attend_new": (
        c_int,
        [*[_pointer] * 3, _float, _pointer, _long, _long, *[_pointer] * 6, *[_long] * 3]
        + [*[_pointer] * 3, *[_long] * 6, _float],
    ),
    "delta_decode": (c_int, [*[_pointer] * 7, _long, _long, *[_pointer] * 2, *[_long] * 5]),
    "attend_rows": (c_int, [*[_pointer] * 8, _long, _long, _pointer, _pointer, *[_long] * 5, _float]),
    "attend_rows_backward": (c_int, [*[_pointer] * 9, _long, _long, *[_pointer] * 4, *[_long] * 5, _float]),
}
_BEYOND = {
    "rotate": "a token's position is beyond the table of angles",
    "rotate_both": "a token's position is beyond the table of angles",
    "attend_decode": "a row or a length is beyond the table, or a slot beyond the cache",
    "attend_new": "a position, a slot, a row or a length is beyond its table",
    "delta_decode": "a slot is beyond the states",
}


@functools.cache
def loaded() -> bool:
    """Return whether the kernels can be called; compile them if this machine has not done so. Logs why not, once."""
    try:
        _library()
    except kernel_library.CompileError as error:
        logger.warning("no kernels for this CPU; torch computes instead: %s", error)
        return False
    return True


def fit(*tensors: Tensor) -> bool:
    """Return whether the kernels can take these: all fp32 or all bf16, on a CPU; and whether there are kernels."""
    dtype = tensors[0].dtype
    if dtype is not torch.float32 and dtype is not torch.bfloat16:
        return False
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.device.type != "cpu":
            return False
    return loaded()


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """(tensor [..., n] whose dense rows are one step apart, that step); itself, where it is so."""
    if tensor.is_contiguous():
        return tensor, tensor.size(-1)
    step, count = tensor.stride(-2) if tensor.dim() > 1 else 0, 1
    if tensor.stride(-1) != 1:
        return tensor.contiguous(), tensor.size(-1)
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size > 1 and stride != step * count:
            return tensor.contiguous(), tensor.size(-1)
        count *= size
    return tensor, step


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of `hidden` [..., h] → (the same shape, the factor of each row [..., 1] in fp32)."""
    assert weight.shape == hidden.shape[-1:]
    (hidden, step), weight = _rows(hidden), weight.contiguous()
    size = hidden.size(-1)
    out = hidden.new_empty(hidden.shape)
    scale = hidden.new_empty(*hidden.shape[:-1], 1, dtype=torch.float32)
    pointers = (hidden.data_ptr(), step, None, None, weight.data_ptr(), out.data_ptr(), scale.data_ptr())
    _call("rms_norm", (hidden, weight), *pointers, scale.numel(), size, eps)
    return out, scale


def add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of `hidden` + `residual` [..., h], that sum)."""
    assert weight.shape == hidden.shape[-1:] and residual.shape == hidden.shape
    if bitwise.is_on():  # of the rounded sum, as trainers norm it
        both = hidden + residual
        return rms_norm(both, weight, eps)[0], both
    (hidden, step), weight = _rows(hidden), weight.contiguous()
    residual = residual.contiguous()
    size = hidden.size(-1)
    out, both = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
    pointers = (hidden.data_ptr(), step, residual.data_ptr(), both.data_ptr(), weight.data_ptr(), out.data_ptr(), None)
    _call("rms_norm", (hidden, residual, weight), *pointers, hidden.numel() // size, size, eps)
    return out, both


def rms_norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of `hidden` [..., h], gradient of `weight` [h]) of `rms_norm`, with the factors that it returned."""
    assert grad.shape == hidden.shape and weight.shape == hidden.shape[-1:]
    (hidden, step), weight, grad = _rows(hidden), weight.contiguous(), grad.contiguous()
    out, grad_weight = grad.new_empty(grad.shape), torch.empty_like(weight)
    tensors = (grad, weight, scale, out, grad_weight)
    pointers = (hidden.data_ptr(), step, *(tensor.data_ptr() for tensor in tensors))
    _call("rms_norm_backward", (grad, hidden, weight), *pointers, scale.numel(), weight.numel())
    return out, grad_weight


def swiglu(both: Tensor) -> Tensor:
    """`silu(gate) * up` [..., f] of gate and up side by side [..., 2 f]."""
    both = both.contiguous()
    size = both.size(-1) // 2
    out = both.new_empty(*both.shape[:-1], size)
    rows = both.numel() // both.size(-1)
    _call("swiglu", (both,), both.data_ptr(), out.data_ptr(), rows, size)
    return out


def swiglu_backward(grad: Tensor, both: Tensor) -> Tensor:
    """Gradient of `both` [..., 2 f] of `swiglu`, for that of its output [..., f]."""
    both, grad = both.contiguous(), grad.contiguous()
    out = both.new_empty(both.shape)
    pointers = (both.data_ptr(), grad.data_ptr(), out.data_ptr())
    rows = both.numel() // both.size(-1)
    _call("swiglu_backward", (both, grad), *pointers, rows, grad.size(-1))
    return out


def rotate(values: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Turn halves of each head of values [T, heads, d] against each other, as rotary embeddings do.

    cos, sin [T, r / 2], of one stride, turn the first r of d dimensions; the others are copied. `back` turns the other
    way, which is the gradient. Raises IndexError if a token has no row of angles.
    """
    assert cos.shape == sin.shape and cos.stride() == sin.stride() and cos.stride(-1) == 1
    count, heads, size = values.shape
    values = values if values.stride(-1) == 1 else values.contiguous()
    out = values.new_empty(values.shape)
    _call(
        *("rotate", (values, cos, sin), values.data_ptr(), *values.stride()[:2], cos.data_ptr(), sin.data_ptr()),
        *(cos.stride(0), cos.size(0), None, -1.0 if back else 1.0, out.data_ptr(), count, heads, size),
        2 * cos.size(-1),
    )
    return out


def rotate_both(query: Tensor, key: Tensor, table: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`rotate` of queries [T, heads * size] and keys [T, heads * size] by rows of `table` [any, r]: r / 2 cosines, then
    as many sines. Raises IndexError if a token has no row of angles."""
    query, key = (values if values.stride(1) == 1 else values.contiguous() for values in (query, key))
    count, turned = query.size(0), table.size(1)
    assert key.size(0) == positions.numel() == count and positions.dtype is torch.int64
    assert query.size(1) % size == key.size(1) % size == 0 and turned <= size
    positions, table = positions.contiguous(), table.contiguous()
    outs = query.new_empty(query.shape), key.new_empty(key.shape)
    _call(
        *("rotate_both", (query, key, table)),
        *(query.data_ptr(), query.stride(0), query.size(1) // size, outs[0].data_ptr()),
        *(key.data_ptr(), key.stride(0), key.size(1) // size, outs[1].data_ptr()),
        *(table.data_ptr(), table.size(0), positions.data_ptr(), count, size, turned),
    )
    return outs


def attend_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one new token a request; keys and values are read where the cache has them.

    query         [B, H, D]
    keys, values  [slots, K, D], [slots, K, V], dense; H / K heads share a key head
    table         [any, longest] int32 slot of each token of each request, rows dense
    rows          [B] int64 row of the table, dense
    lengths       [B] int64 tokens of each request, the new one included, dense
    window        a token sees so many before itself; None: all
    sinks         [H] fp32, dense: scores that take part in each softmax without a value

    Returns [B, H, V]. Raises IndexError if a row or a length is beyond the table, or a slot of it beyond the cache.
    """
    count, heads, size = query.shape
    query = query if query.stride()[1:] == (size, 1) else query.contiguous()
    out = query.new_empty(count, heads, values.size(2))
    _call(
        *("attend_decode", (query, keys, values)),
        *(query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(), table.data_ptr(), table.stride(0)),
        *(*table.shape, rows.data_ptr(), lengths.data_ptr(), None if sinks is None else sinks.data_ptr()),
        *(out.data_ptr(), keys.size(0), count, heads, keys.size(1), size, values.size(2), values.stride(0)),
        *(-1 if window is None else window, scale),
    )
    return out


def attend_new(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The attention of a decode step in one call: heads are normed and rotated, keys and values stored, then attended.

    All is dense. `angles` and `positions` are as `table` and `positions` of `rotate_both`; what is not listed is as of
    `attend_decode`, with heads of keys and values of one size D.

    qkv    [B, (H + 2 K) * D] queries, keys and values of the new tokens; overwritten
    norms  weights [D] of the norms of queries and keys; None: there are none
    slots  [B] int64 where the cache takes the new keys and values

    Returns [B, H * D]. Raises IndexError if a position, a slot, a row or a length is beyond its table.
    """
    (count, width), (num_slots, groups, size) = qkv.shape, keys.shape
    heads = width // size - 2 * groups
    assert values.shape == keys.shape and width % size == 0 and heads % groups == 0
    assert angles.size(1) % 2 == 0 and angles.size(1) <= size and table.dtype is torch.int32
    for numbers in (positions, slots, rows, lengths):
        assert numbers.dtype is torch.int64 and numbers.numel() == count and numbers.is_contiguous()
    for dense in (qkv, angles, keys, values, *(norms or ())):
        assert dense.is_contiguous()
    assert norms is None or norms[0].numel() == norms[1].numel() == size
    place = qkv.new_empty(count * (heads + groups) * size)
    out = qkv.new_empty(count, heads * size)
    weights = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
    _call(
        *("attend_new", (qkv, angles, keys, values, *(norms or ()))),
        *(qkv.data_ptr(), *weights, eps, angles.data_ptr(), *angles.shape, positions.data_ptr(), place.data_ptr()),
        *(slots.data_ptr(), keys.data_ptr(), values.data_ptr(), table.data_ptr(), table.stride(0), *table.shape),
        *(rows.data_ptr(), lengths.data_ptr(), out.data_ptr(), num_slots, count, heads, groups, size),
        *(-1 if window is None else window, scale),
    )
    return out


def delta_decode(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor, share: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """One new token a request of gated delta nets, whose states it changes where they are.

    query, key   [B, H, K], made of one length here; HV / H heads of values share one
    value        [B, HV, V]
    keep, share  [B, HV] fp32: the factor of the states, and how much of the way to the value they take
    states       [slots, HV, V, K] fp32, each slot dense
    slots        [B] int64, each another one

    Returns [B, HV, V]. Raises IndexError if a slot is beyond the states.
    """
    (count, heads, size), (_, value_heads, value_size) = query.shape, value.shape
    assert key.shape == query.shape and value_heads % heads == 0
    assert keep.shape == share.shape == (count, value_heads) and slots.shape == (count,)
    assert states.shape[1:] == (value_heads, value_size, size) and states[0].is_contiguous()
    for dense, dtype in ((keep, torch.float32), (share, torch.float32), (slots, torch.int64)):
        assert dense.is_contiguous() and dense.dtype is dtype
    assert states.dtype is torch.float32
    parts = [part if part[0].is_contiguous() else part.contiguous() for part in (query, key, value)]
    strides = torch.tensor([part.stride(0) for part in parts])
    out = query.new_empty(value.shape)
    _call(
        *("delta_decode", parts),
        *(*(part.data_ptr() for part in parts), strides.data_ptr(), keep.data_ptr(), share.data_ptr()),
        *(states.data_ptr(), states.stride(0), len(states), slots.data_ptr(), out.data_ptr()),
        *(count, heads, value_heads, size, value_size),
    )
    return out


@dataclass(frozen=True)
class RowTable:
    """Where the sequences of a packed row have their tokens; sequences that share tokens stand side by side."""

    places: Tensor  # [tokens of all sequences] int32 packed token of each, one sequence after the other
    starts: Tensor  # [sequences + 1] int64 where each begins among these
    firsts: Tensor  # [sequences] int64 tokens at its begin that a sequence before it has, too: attended to once
    families: Tensor  # [families + 1] int64 first sequence of each family, within which sequences share tokens
    longest: int  # tokens of the longest sequence
    num_tokens: int  # of the packed row
    is_whole: bool  # each of its tokens is in a sequence

    def attended(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each token that is attended to as a request of `attend_decode`, which sees the tokens before it.

        Returns (packed token of each [B], the table of slots, its rows [B], lengths [B]).
        """
        sizes = self.starts.diff()
        offsets = torch.arange(self.longest)
        table = torch.zeros(len(sizes), self.longest, dtype=torch.int32)
        table[offsets < sizes[:, None]] = self.places
        rows, lengths = ((offsets >= self.firsts[:, None]) & (offsets < sizes[:, None])).nonzero(as_tuple=True)
        return table[rows, lengths].long(), table, rows, lengths + 1

    def pointers(self) -> tuple[int, ...]:
        """The tensors, and the two sizes that the kernels take after them."""
        tensors = (self.places, self.starts, self.firsts, self.families)
        return (*(tensor.data_ptr() for tensor in tensors), self.families.numel() - 1, self.longest)


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, table: RowTable, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of the sequences in a packed row: query [T, H, D], key [T, K, D], value [T, K, V].

    A token sees `window` tokens before itself; None: all. Returns ([T, H, V], the logarithm of each softmax's sum
    [T, H] in fp32); 0 for tokens of no sequence.
    """
    parts, strides = _heads(query, key, value)
    (count, heads, size), (_, groups, _), value_size = query.shape, key.shape, value.size(2)
    assert count == table.num_tokens and key.shape == (count, groups, size) and heads % groups == 0
    assert value.shape == (count, groups, value_size)
    new = query.new_empty if table.is_whole else query.new_zeros
    out, logs = new(count, heads, value_size), new(count, heads, dtype=torch.float32)
    _call(
        *("attend_rows", (query, key, value)),
        *(*(part.data_ptr() for part in parts), strides.data_ptr(), *table.pointers(), out.data_ptr()),
        *(logs.data_ptr(), heads, groups, size, value_size, -1 if window is None else window, scale),
    )
    return out, logs


def attend_rows_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logs: Tensor,
    table: RowTable,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of `attend_rows`, for that of its output [T, H, V].

    Where a softmax had more terms in its sum than the keys, without values, they are in `logs`.
    """
    parts, strides = _heads(query, key, value)
    grad = grad.contiguous()
    new = query.new_empty if table.is_whole else query.new_zeros
    of_query = new(query.shape)
    # Tokens that sequences share get a part from each: in fp32, however the tensors are stored.
    of_key, of_value = (torch.zeros(part.shape, dtype=torch.float32) for part in (key, value))
    _call(
        *("attend_rows_backward", (grad, query, key, value)),
        *(grad.data_ptr(), *(part.data_ptr() for part in parts), strides.data_ptr(), *table.pointers()),
        *(logs.data_ptr(), of_query.data_ptr(), of_key.data_ptr(), of_value.data_ptr()),
        *(query.size(1), key.size(1), query.size(2), value.size(2), -1 if window is None else window, scale),
    )
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)


def _heads(*tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """(tensors [T, heads, size] of dense heads; [2 a tensor] int64 steps from token to token and from head to head)."""
    dense = [tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in tensors]
    return dense, torch.tensor([step for tensor in dense for step in tensor.stride()[:2]])


def _call(name: str, tensors: Sequence[Tensor], *arguments: object) -> None:
    """Call a kernel that computes with `tensors`, all fp32 or all bf16; with as many threads as torch has."""
    dtype = tensors[0].dtype
    assert all(tensor.dtype is dtype for tensor in tensors) and dtype in (torch.float32, torch.bfloat16)
    code = getattr(_library(), name)(*arguments, dtype is torch.bfloat16, torch.get_num_threads())
    if code == 1:
        raise MemoryError("no memory for the sums of a kernel")
    if code == 2:
        raise IndexError(_BEYOND[name])


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, with the types of its functions. Raises CompileError if there is none here."""
    library = kernel_library.load()
    for name, (result, arguments) in _ARGUMENTS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, [*arguments, c_int, c_int]
    return library
