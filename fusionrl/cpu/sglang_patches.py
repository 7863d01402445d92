"""All that the wing puts into SGLang's server on a CPU, from outside."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch

from fusionrl.cpu import attention, image_processors, sampling, sglang_layers, sglang_models

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def register(*, speculates: bool, adapts: bool) -> None:
    """Patch this process, and those forked from it; call it once.

    speculates  with drafts of n-grams
    adapts      it serves adapters (LoRA)
    """
    attention.register()
    name_device()
    sglang_layers.register()
    sglang_models.register()
    image_processors.register()
    _sleep_while_paused()
    sampling.register()
    if speculates:
        from fusionrl.cpu import speculation  # imports SGLang's speculative decoding

        speculation.register()
    if adapts:
        from fusionrl.cpu import sglang_lora

        sglang_lora.register()


def name_device() -> None:
    """Let `torch.get_device_module()` return `torch.cpu`, whatever torch was built for.

    A CUDA build returns `torch.cuda`, whose functions raise without a GPU. SGLang calls them when an engine gives its
    memory back, which on a CPU does nothing.
    """
    original = torch.get_device_module

    def get_device_module(device: torch.device | str | None = None) -> ModuleType:
        return original("cpu" if device is None and not torch.cuda.is_available() else device)

    torch.get_device_module = get_device_module


def _sleep_while_paused() -> None:
    """Let a paused scheduler sleep until a message comes, as with --sleep-on-idle.

    SGLang's asks for messages without a rest while generation is paused. On a CPU the trainers need that core: they
    send the weights for which the engines are paused.
    """
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self: Scheduler) -> None:
        original(self)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep
