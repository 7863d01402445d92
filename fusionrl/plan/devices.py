"""Kinds of devices and their memory, and the order in which engines and trainers share them."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusionrl.base.memory_groups import limited_groups
from fusionrl.plan.visible_devices import VARIABLE, visible_names

GIB = 2**30
# Memory cards of the GDDR kind keep their error-correcting codes in the same memory, 1/16 of it.
_INLINE_ECC = 15 / 16


@dataclass(frozen=True)
class DeviceKind:
    """One kind of GPU.

    memory     bytes
    bandwidth  bytes a second of its memory
    peak       bf16 FLOP a second, dense
    source     where the figures are from
    """

    memory: float
    bandwidth: float
    peak: float
    source: str


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
    try:
        sizes.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    except (ValueError, OSError):  # a system without these names
        pass
    return min([*sizes, *(group.limit for group in limited_groups(root))], default=None)
