"""torch's device module on a machine without a GPU: the CPU's, whatever torch was built for.

`torch.get_device_module()` of a CUDA build is `torch.cuda` even without a GPU, and its functions then raise.
SGLang asks so when an engine gives its memory back, which on a CPU does nothing. A CPU build says `torch.cpu`.
"""

from __future__ import annotations

from types import ModuleType

import torch


def register() -> None:
    """Let `torch.get_device_module()` of this process, and of those forked from it, say `torch.cpu`. Idempotent."""
    original = torch.get_device_module
    if torch.cuda.is_available() or getattr(original, "is_cpus", False):
        return

    def get_device_module(device: torch.device | str | None = None) -> ModuleType:
        return original("cpu" if device is None else device)

    get_device_module.is_cpus = True  # type: ignore[attr-defined]
    torch.get_device_module = get_device_module
