"""The CPU layer of Megatron-core: its unmodified package runs on torch's CPU build with gloo.

`install` comes before the first import of megatron.core, `patch` after it. A process that imports Megatron-core for
others, its forks, calls `before_import` alone: torch stays as it is until one of them calls `install`. They do nothing
where CUDA is there. Each shim answers a call of Megatron-core that assumes CUDA: devices, streams, random states,
`device="cuda"` and `pin_memory` of torch's factories, moves and types of tensors, sizes of the experts' exchange, and
gathering parts of different sizes, which gloo lacks. Four save time: no function is compiled by torch, its optimizers
do not import its compiler, gradients are added in place, and a kernel rotates rows.

`trainer/megatron_core.py` mends what Megatron-core lacks without Transformer Engine, on a CPU or a GPU, the
optimizer's stand-in among it. Without the TransformerConfig values `OVERRIDES` a CPU run is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusionrl.base import cpu_wing
from fusionrl.cpu.row_functions import patch_rotary

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
    from torch.distributed import ProcessGroup, Work

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")
_UNCOMPILED = "__dynamo_disable"  # torch's name for what its wrapper calls, once it is there
# Packages of the GPU requirement set that Megatron uses where they are installed: an optimizer and norms of gradients
# that are kernels, and attention that cannot be imported without CUDA's driver.
_KERNELS = ("transformer_engine", "flash_mla")
_state = {"importable": False, "installed": False, "patched": False}

# Name → (value, why). A user who sets one of these otherwise gets an error with this reason.
OVERRIDES: dict[str, tuple[Any, str]] = {
    "use_cpu_initialization": (True, "there is no other device"),
    "deallocate_pipeline_outputs": (False, "gloo's isend does not keep the storage alive: wrong activations are sent"),
    "batch_p2p_comm": (False, "the batched exchange fails with interleaved pipeline stages"),
    "masked_softmax_fusion": (False, "it is a CUDA kernel"),
    "bias_dropout_fusion": (False, "it is compiled for CUDA"),
    "bias_activation_fusion": (False, "it is compiled for CUDA"),
    "apply_rope_fusion": (False, "it is a CUDA kernel"),
    "persist_layer_norm": (False, "it is a CUDA kernel"),
    "cross_entropy_loss_fusion": (False, "it is compiled for CUDA"),
    "moe_grouped_gemm": (False, "it is a CUDA kernel"),
    "moe_permute_fusion": (False, "it is a CUDA kernel"),
}


def is_installed() -> bool:
    """Return whether `install` has put the shims into this process."""
    return _state["installed"]


class _Event(torch.cpu.Event):
    """A CUDA event on a device where everything has happened by the time it is asked."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Stream(torch.cpu.Stream):
    """A CUDA stream on a device that runs everything in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record_event(self, event: object = None) -> object:
        return event or _Event()

    def synchronize(self) -> None: ...


def before_import() -> None:
    """Let megatron.core be imported; changes nothing of torch. Once a process."""
    if not cpu_wing.lacks_cuda() or _state["importable"]:
        return
    assert "megatron.core" not in sys.modules, "megatron_patches.install() must run before megatron.core is imported"
    for name in _KERNELS:  # None is the import system's sign for "not there"; a module that is imported stays
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    cpu_wing.install_stand_ins()
    jit: Any = types.ModuleType("megatron.core.jit")
    jit.noop_decorator = jit.jit_fuser = lambda function: function
    jit.enable_jit_fuser = jit.disable_jit_fuser = lambda: None
    sys.modules["megatron.core.jit"] = jit
    _state["importable"] = True


def install() -> bool:
    """Put the shims into torch; once a process, before megatron.core is imported. True where they are.

    After `before_import`, megatron.core may be there: it takes nothing from torch by name that is replaced here.
    """
    if not cpu_wing.lacks_cuda():
        return False
    if _state["installed"]:
        return True
    before_import()
    _install_cuda_functions()
    _install_factories()
    _install_tensor_methods()
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        _install_compiler(getattr(torch.optim.Optimizer, name))
    _state["installed"] = True
    return True


def patch() -> None:
    """Mend what needs megatron.core to be imported; once a process."""
    if not _state["installed"] or _state["patched"]:
        return
    from megatron.core.tensor_parallel import random as tp_random
    from megatron.core.transformer import attention

    def get_rng_state(device: object = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    tp_random._get_cuda_rng_state, tp_random._set_cuda_rng_state = get_rng_state, set_rng_state
    # The tracker warns when the CPU's RNG state changed inside its fork(); here that is the state it forks.
    logging.getLogger(tp_random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    original = tp_random.CheckpointWithoutOutput.__init__

    @functools.wraps(original)
    def init(self: CheckpointWithoutOutput, fp8: object = False) -> None:
        original(self, fp8)
        self.fp8 = bool(fp8)  # Megatron takes False for "fp8 is on", in selective recompute

    tp_random.CheckpointWithoutOutput.__init__ = init
    _patch_exchange()
    patch_gradients()
    patch_rotary(attention)
    _state["patched"] = True


def _patch_exchange() -> None:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host
    gather = mappings._gather_along_first_dim

    def gather_uneven(
        tensor: torch.Tensor,
        group: ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(tensor, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: tensor.size(0)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    mappings._gather_along_first_dim = gather_uneven


def _install_cuda_functions() -> None:
    cuda, cpu, stream = torch.cuda, torch.device("cpu"), _Stream()
    cuda.current_device = lambda: cpu
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(int(seed)) and None


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _install_compiler(wrapper: Callable[..., object]) -> None:
    """Let `wrapper`, made by `_disable_dynamo`, use the compiler only if another module imported it."""
    function = getattr(wrapper, "__wrapped__", None)
    if function is None:
        return  # this torch does not wrap it

    @functools.wraps(function)
    def uncompiled(*args: object, **kwargs: object) -> object:
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled
            return function(*args, **kwargs)
        setattr(function, _UNCOMPILED, None)
        return wrapper(*args, **kwargs)

    setattr(function, _UNCOMPILED, uncompiled)


def _install_factories() -> None:
    def on_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            if kwargs:
                if _is_cuda(kwargs.get("device")):
                    kwargs["device"] = "cpu"
                if kwargs.get("pin_memory"):
                    kwargs["pin_memory"] = False
            return function(*args, **kwargs)

        return wrapper

    # torch makes its table of factories when a device is first used as a context. Made after this, it would hold the
    # wrappers, and such contexts would do nothing: transformers would load models with wrong rotary frequencies.
    with torch.device("cpu"):
        torch.empty(0)
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _install_tensor_methods() -> None:
    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return tensor_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: object = None, *args: object, **kwargs: object) -> object:
        if dtype is None and not args and not kwargs:
            name = tensor_type(self)  # the optimizer and clipping look for torch.cuda.FloatTensor
            return name if self.is_cuda else name.replace("torch.", "torch.cuda.", 1)
        return tensor_type(self, dtype, *args, **kwargs)

    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.to = to
    torch.Tensor.type = type_


if TYPE_CHECKING:
    Collective = Callable[..., Work | None]


def patch_gradients() -> None:
    """Let gradients and weights stay where they are, without full copies of them. Once a process.

    New memory is mapped page by page on a CPU, so a copy of all gradients costs about as much as the optimizer's step.
    Megatron-core leaves it to CUDA extensions to avoid some copies: the gradient of a weight is written to memory of
    its own and then added to the sum, clipping scales into new memory, and gloo copies all even where there is one
    rank.
    """
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=add_gradient, wgrad_gemm_accum_fp16=add_gradient
    )
    layers._grad_accum_fusion_available = True
    clip_grads.multi_tensor_scale_impl = scale
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(param_and_grad_buffer, name, unless_alone(getattr(param_and_grad_buffer, name)))


def add_gradient(inputs: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add grad.T @ inputs, a layer's output's grad [T, out] and its inputs [T, in], to `total` [out, in]."""
    if grad.dtype is total.dtype:
        total.addmm_(grad.t(), inputs)
    else:
        total.add_(grad.t() @ inputs)


def scale(chunk_size: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], factor: float | Tensor) -> None:
    """Scale `tensors[0]` into `tensors[1]`, in place where these are the same; the other arguments are a kernel's."""
    for source, target in zip(*tensors, strict=True):
        if source is target:
            target.mul_(factor)
        else:
            target.copy_(source * factor)


def unless_alone(collective: Collective) -> Collective:
    """`collective(output, input, ...)` of a buffer and a rank's part of it, which with one rank are the same."""

    @functools.wraps(collective)
    def call(
        output: Tensor,
        inputs: Tensor,
        *args: object,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        **kwargs: object,
    ) -> Work | None:
        if async_op or group is None or group.size() > 1:
            return collective(output, inputs, *args, group=group, async_op=async_op, **kwargs)
        if output.data_ptr() != inputs.data_ptr():
            output.copy_(inputs)
        return None

    return call
