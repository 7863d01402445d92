"""Kernels of a transformer on a CPU (`cpu_kernels.c`), compiled on the user's machine, and their calls for tensors.

torch does each of these in several operations, each of which passes over memory and takes microseconds to begin; on
small tensors that is most of their time. The functions here take fp32 tensors in a CPU's memory, as `fit` tells, and
write new ones. `loaded` tells whether they can be called: where there is no C compiler they cannot, and who calls them
goes on with torch.

The library is kept in the user's cache folder, for this compiler and this kind of CPU. It shares OpenMP's threads with
torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from fusionrl.base.environment import child_environment
from fusionrl.upstream.kept_files import cache_folder, file_fact, is_own_file

SOURCE = Path(__file__).with_suffix(".c")
# Sums may be vectorised where the source says so, and nowhere else: NaN and infinities travel as in torch.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-shared", "-fPIC")
COMPILE_LIMIT_S = 120.0

logger = logging.getLogger(__name__)

_pointer, _long, _float = c_void_p, c_int64, c_float
_ARGUMENTS = {
    "rms_norm": (None, [_pointer, _long, *[_pointer] * 5, _long, _long, _float]),
    "rms_norm_backward": (c_int, [_pointer, _long, *[_pointer] * 5, _long, _long]),
    "swiglu": (None, [_pointer, _pointer, _long, _long]),
    "swiglu_backward": (None, [*[_pointer] * 3, _long, _long]),
    "rotate": (
        c_int,
        [_pointer, _long, _long, *[_pointer] * 2, _long, _long, _pointer, _float, _pointer, *[_long] * 4],
    ),
    "attend_decode": (c_int, [_pointer, _long, *[_pointer] * 3, _long, *[_pointer] * 3, *[_long] * 7, _float]),
}


class CompileError(Exception):
    """The kernels cannot be compiled or loaded here; the text says why."""


@functools.cache
def loaded() -> bool:
    """Return whether the kernels can be called; compile them if this machine has not done so. Logs why not, once."""
    try:
        _library()
    except CompileError as error:
        logger.warning("Kernels for this CPU: none, torch's operations take their place (%s)", error)
        return False
    return True


def fit(*tensors: Tensor) -> bool:
    """Return whether the kernels can take these tensors: fp32, on a CPU; and whether there are kernels."""
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
            return False
    return loaded()


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """(tensor [..., n] whose dense rows are one step apart, that step); itself, where it is so."""
    if tensor.is_contiguous():
        return tensor, tensor.size(-1)
    step, count = tensor.stride(-2) if tensor.dim() > 1 else 0, 1
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if tensor.stride(-1) != 1 or (size > 1 and stride != step * count):
            return tensor.contiguous(), tensor.size(-1)
        count *= size
    return tensor, step


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of `hidden` [..., h] → (the same shape, the factor of each row [..., 1])."""
    hidden, step = _rows(hidden)
    size = hidden.size(-1)
    out, scale = hidden.new_empty(hidden.shape), hidden.new_empty(*hidden.shape[:-1], 1)
    _library().rms_norm(
        *(hidden.data_ptr(), step, None, None, weight.data_ptr(), out.data_ptr(), scale.data_ptr()),
        *(scale.numel(), size, eps),
    )
    return out, scale


def add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of `hidden` + `residual` [..., h], that sum)."""
    hidden, step = _rows(hidden)
    residual = residual.contiguous()
    size = hidden.size(-1)
    out, both = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
    _library().rms_norm(
        *(hidden.data_ptr(), step, residual.data_ptr(), both.data_ptr(), weight.data_ptr(), out.data_ptr(), None),
        *(hidden.numel() // size, size, eps),
    )
    return out, both


def rms_norm_backward(grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of `hidden` [..., h], gradient of `weight` [h]) of `rms_norm`, with the factors that it returned."""
    hidden, step = _rows(hidden)
    grad = grad.contiguous()
    out, of_weight = grad.new_empty(grad.shape), torch.empty_like(weight)
    others = (grad, weight, scale, out, of_weight)
    _check(
        _library().rms_norm_backward(
            hidden.data_ptr(), step, *(tensor.data_ptr() for tensor in others), scale.numel(), weight.numel()
        )
    )
    return out, of_weight


def swiglu(both: Tensor) -> Tensor:
    """`silu(gate) * up` [..., f] of gate and up side by side [..., 2 f]."""
    both = both.contiguous()
    size = both.size(-1) // 2
    out = both.new_empty(*both.shape[:-1], size)
    _library().swiglu(both.data_ptr(), out.data_ptr(), both.numel() // both.size(-1), size)
    return out


def swiglu_backward(grad: Tensor, both: Tensor) -> Tensor:
    """Gradient of `both` [..., 2 f] of `swiglu`, for that of its output [..., f]."""
    both, grad = both.contiguous(), grad.contiguous()
    out = both.new_empty(both.shape)
    _library().swiglu_backward(
        both.data_ptr(), grad.data_ptr(), out.data_ptr(), both.numel() // both.size(-1), grad.size(-1)
    )
    return out


def rotate(values: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, back: bool = False) -> Tensor:
    """Turn halves of each head against each other, as rotary embeddings do; the dimensions beyond them are copied.

    Args:
        values: [T, heads, d], each head dense
        cos, sin: [any, r / 2], dense rows of one stride: the first r of d dimensions are turned
        positions: [T] int64 row of the angles of each token; None: row t for token t
        back: turn the other way, which is the gradient

    Raises:
        IndexError: a token has no row of angles.
    """
    count, heads, size = values.shape
    out = values.new_empty(values.shape)
    code = _library().rotate(
        *(values.data_ptr(), *values.stride()[:2], cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.size(0)),
        *(None if positions is None else positions.data_ptr(), -1.0 if back else 1.0, out.data_ptr()),
        *(count, heads, size, 2 * cos.size(-1)),
    )
    _check(code)
    return out


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
) -> Tensor:
    """Attention of one new token a request; keys and values are read where the cache has them.

    Args:
        query: [B, H, D], each request's heads dense
        keys, values: [slots, K, D], [slots, K, V]; H / K heads share a key head
        table: [any, longest] int32 slot of each token of each request
        rows: [B] int64 row of the table
        lengths: [B] int64 tokens of each request, the new one included
        window: a token sees so many before itself; None: all

    Returns:
        [B, H, V]

    Raises:
        IndexError: a slot of the table is not in the cache.
    """
    count, heads, size = query.shape
    out = query.new_empty(count, heads, values.size(2))
    code = _library().attend_decode(
        *(query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(), table.data_ptr(), table.stride(0)),
        *(rows.data_ptr(), lengths.data_ptr(), out.data_ptr(), keys.size(0), count, heads, keys.size(1), size),
        *(values.size(2), -1 if window is None else window, scale),
    )
    _check(code)
    return out


def _check(code: int) -> None:
    if code == 1:
        raise MemoryError("no memory for the sums of a kernel")
    if code == 2:
        raise IndexError("a position beyond the table of angles, or a slot beyond the cache")


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, compiled if it is not there.

    Raises:
        CompileError: it cannot be had here.
    """
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        raise CompileError("no C compiler: install gcc")
    try:
        path = _path(compiler)
        if not is_own_file(path):
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))  # after torch, whose OpenMP it shares
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        raise CompileError(f"{error}{': ' + said.strip()[-500:] if said else ''}") from error
    for name, (result, arguments) in _ARGUMENTS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _path(compiler: str) -> Path:
    """The library of these sources, of this compiler and of a CPU with these instructions."""
    resolved = Path(compiler).resolve()
    facts = (SOURCE.read_text(), *FLAGS, file_fact(resolved, resolved.stat()), platform.machine(), _instructions())
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    return cache_folder() / f"cpu_kernels-{digest}.so"


def _instructions() -> str:
    """What the CPU can do, as the kernel tells it; "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # for this user alone
        new = Path(folder) / path.name
        command = [compiler, *FLAGS, "-o", str(new), str(SOURCE), "-lm"]
        environment = child_environment("compiler")
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, env=environment)
        new.chmod(0o700)
        os.replace(new, path)
