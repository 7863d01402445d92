"""Kinds of devices, their memory and speed, their names, and the order in which engines and trainers share them.

GPUs have the names of CUDA_VISIBLE_DEVICES: one mapping for placement, trainers, engines and CUDA IPC. A process
numbers the GPUs that it sees from 0, in the order of the list. These numbers (ordinals) are what torch and SGLang take;
the list has names: numbers of the machine, UUIDs, or slices of a GPU (MIG). Ray gives out the names of its node's list,
and all processes of a run on a node keep that list, so an ordinal means the same GPU to all of them. A process that
sees several MIG slices can use the first alone: its list is that one slice, and its ordinal 0.
"""

import contextlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusionrl.base.memory_groups import limited_groups

GIB = 2**30
# Memory cards of the GDDR kind keep their error-correcting codes in the same memory, 1/16 of it.
_INLINE_ECC = 15 / 16


@dataclass(frozen=True)
class DeviceKind:
    """One kind of GPU."""

    memory: float  # bytes
    bandwidth: float  # bytes a second of its memory
    peak: float  # bf16 FLOP a second, dense
    source: str  # where the figures are from


# The vendors write a card's memory in GB and mean about as many GiB (an "80 GB" H100 reports 79.6 GiB).
KINDS: dict[str, DeviceKind] = {
    "a100-40g": DeviceKind(40 * GIB, 1.555e12, 312e12, "NVIDIA A100 data sheet, SXM 40 GB"),
    "a100-80g": DeviceKind(80 * GIB, 2.039e12, 312e12, "NVIDIA A100 data sheet, SXM 80 GB"),
    "h100": DeviceKind(80 * GIB, 3.35e12, 989e12, "NVIDIA H100 data sheet, SXM"),
    "h20": DeviceKind(96 * GIB, 4.0e12, 148e12, "NVIDIA H20 data sheet"),
    "h200": DeviceKind(141 * GIB, 4.8e12, 989e12, "NVIDIA H200 data sheet, SXM"),
    "b200": DeviceKind(180 * GIB, 8.0e12, 2250e12, "NVIDIA DGX B200 data sheet, an eighth of it"),
    "gb200": DeviceKind(186 * GIB, 8.0e12, 2500e12, "NVIDIA GB200 NVL72 data sheet, one of its GPUs"),
    "l40s": DeviceKind(48 * GIB * _INLINE_ECC, 0.864e12, 362e12, "NVIDIA L40S data sheet, ECC on"),
    "a10": DeviceKind(24 * GIB * _INLINE_ECC, 0.6e12, 125e12, "NVIDIA A10 data sheet, ECC on"),
    "l4": DeviceKind(24 * GIB * _INLINE_ECC, 0.3e12, 121e12, "NVIDIA L4 data sheet, ECC on"),
    "rtx4090": DeviceKind(24 * GIB, 1.008e12, 165.2e12, "NVIDIA Ada GPU architecture white paper, RTX 4090"),
    "mi300x": DeviceKind(192 * GIB, 5.3e12, 1307e12, "AMD Instinct MI300X data sheet"),
}


@dataclass(frozen=True)
class Machine:
    """The memory that an estimate is compared with; None: not known.

    device       "cpu": processes share the host's memory, and devices are only numbers
    kind         name of the devices, as a reader knows it
    device_memory, host_memory  bytes: of one device, of one node
    has_fused_layers  whether Transformer Engine is installed
    """

    device: Literal["cpu", "cuda"]
    kind: str
    device_memory: float | None = None
    host_memory: float | None = None
    has_fused_layers: bool = True


def this_machine(device: Literal["cpu", "cuda"]) -> Machine:
    """The machine that this runs on."""
    memory = host_memory()
    if device == "cpu":
        return Machine("cpu", "this machine", None, memory)
    fused = importlib.util.find_spec("transformer_engine") is not None
    unknown = Machine("cuda", "a GPU of this machine", None, memory, fused)
    try:
        import pynvml
    except ImportError:  # nvidia-smi found the GPU
        return unknown
    try:
        pynvml.nvmlInit()
        first = next(iter(visible_names(os.environ.get(VARIABLE)) or ("0",)))
        of = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        handle = of(int(first) if first.isdigit() else first)
        name, total = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return unknown
    return Machine("cuda", name if isinstance(name, str) else name.decode(), float(total), memory, fused)


def host_memory(root: Path = Path("/")) -> float | None:
    """Bytes that this machine's processes may use: its memory, or less where a control group says so."""
    sizes: list[float] = []
    with contextlib.suppress(ValueError, OSError):  # a system without these names
        sizes.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    return min([*sizes, *(group.limit for group in limited_groups(root))], default=None)


VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """One GPU, or MIG slice, as the processes of its node find it.

    position  its place among those of the node
    ordinal   its number in a process that uses it
    alone     the list of a process that uses it, where that differs from its node's; None: it keeps the node's
    """

    position: int
    ordinal: int
    alone: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that uses it."""
        return {} if self.alone is None else {VARIABLE: self.alone}


def visible_names(value: str | None) -> tuple[str, ...] | None:
    """Return the names in a value of CUDA_VISIBLE_DEVICES, up to the first that is none; None: all GPUs are visible."""
    if value is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in value.split(",")):
        if not (name.isdigit() or name.startswith(("GPU-", "MIG-"))):
            break  # CUDA reads no further; "-1" is the usual way to hide what follows
        names.append(name)
    if len({int(name) if name.isdigit() else name for name in names}) < len(names):
        raise ValueError(f"{VARIABLE}={value}: a GPU is named twice, with which CUDA sees none; name each once")
    return tuple(names)


def countable(value: str | None) -> int | None:
    """Return how many GPUs the list names where only it can tell; None: the machine can, and numbers may be wrong."""
    names = visible_names(value)
    return len(names) if names and not all(name.isdigit() for name in names) else None


def locate(value: str | None, name: str) -> Gpu:
    """Return the GPU that Ray calls `name`, on a node whose Ray was started with this value of CUDA_VISIBLE_DEVICES."""
    names, name = visible_names(value), name.strip()
    if names is None:
        return Gpu(int(name), int(name))
    if name not in names:
        raise ValueError(
            f"{VARIABLE}={value}: Ray gives out the GPU {name!r}, which CUDA does not see there; start Ray with a list"
            " of GPUs that the node has, or without"
        )
    position = names.index(name)
    return Gpu(position, 0, name) if name.startswith("MIG-") else Gpu(position, position)


def nth(value: str | None, number: int) -> Gpu:
    """Return the GPU at this place of the list, for a run without Ray."""
    names = visible_names(value)
    if names is not None and number >= len(names):
        raise ValueError(f"{VARIABLE}={value}: it names {len(names)} GPUs, and the run needs GPU {number}; name more")
    return locate(value, str(number) if names is None else names[number])


def refuse_slices(gpus: Sequence[Gpu], num_trainers: int, engine_size: int, transport: str | None) -> None:
    """Refuse what slices of a GPU (MIG) cannot do: NCCL connects no two of them."""
    if all(gpu.alone is None for gpu in gpus):
        return
    cure = "MIG slices are not connected by NCCL; take whole GPUs"
    if num_trainers > 1:
        raise ValueError(f"--actor-num-gpus-per-node: {num_trainers} trainers on MIG slices: {cure}, or one trainer")
    if engine_size > 1:
        raise ValueError(f"--rollout-num-gpus-per-engine {engine_size} on MIG slices: {cure}, or 1")
    if transport == "broadcast":
        raise ValueError(f"--update-weight-transport broadcast on MIG slices: {cure}, or disk, or --colocate")


CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"


def shared_settings(server_args: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, str]:
    """Return both variables as SGLang would leave them: a flag of the engines wins, then the user's value, then "0"."""
    symmetric = bool(server_args.get("enable_symm_mem"))
    multicast = symmetric or bool(server_args.get("enable_nccl_nvls"))
    return {CUMEM: "1" if symmetric else environ.get(CUMEM, "0"), NVLS: "1" if multicast else environ.get(NVLS, "0")}


def peak_flops(name: str, memory_bytes: float | None = None) -> float | None:
    """Dense bf16 FLOP a second of a GPU by its driver's name ("NVIDIA H100 80GB HBM3"); None: it is in no table.

    memory_bytes  tells kinds of one name apart
    """
    words = name.lower().replace("-", " ").replace("rtx ", "rtx").split()
    if {"pcie", "nvl"} & set(words):  # other figures than the boards that the table has
        return None
    kinds = [kind for short, kind in ((kind.partition("-")[0], kind) for kind in KINDS) if short in words]
    if memory_bytes is not None:
        kinds.sort(key=lambda kind: abs(KINDS[kind].memory - memory_bytes))
    return KINDS[kinds[0]].peak if kinds else None
