"""Names of `slime.utils.accelerator`: CUDA where there is a GPU, else the CPU."""

from __future__ import annotations

from typing import Any

import torch


def device_type() -> str:
    """Return `cuda` or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(index: int | None = None) -> str:
    """Return a device's name as torch writes it."""
    kind = device_type()
    return kind if index is None or kind == "cpu" else f"{kind}:{index}"


def device(index: int | None = None) -> torch.device:
    """Return a device."""
    return torch.device(device_name(index))


def current_device() -> int | torch.device:
    """Return the number of the current GPU, or the CPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu")


def set_device(index: int) -> None:
    """Make a GPU the current one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(index)


def synchronize() -> None:
    """Wait for the current GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def current_stream() -> Any:
    """Return the current stream of a GPU; None without one."""
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


def mem_get_info() -> tuple[int, int]:
    """Return free and total bytes of the current GPU; zeros without one."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)


def autocast(**options: Any) -> torch.autocast:
    """Return a block of mixed precision."""
    return torch.autocast(device_type(), **options)


def is_musa_available() -> bool:
    """Return False."""
    return False


def is_musa_environment() -> bool:
    """Return False."""
    return False
