"""All that the wing puts into SGLang's server on a CPU, from outside.

SGLang's attention backend `torch_native` computes one request at a time: a decode step of 256 requests and 4 layers is
1,024 times the same dozen small calls. `ATTENTION_BACKEND` attends the whole batch in a few calls a layer
(`batched_attention.py`). It is a subclass of `torch_native` and leaves to it encoders and cross attention, and a
separate cache for layers with a sliding window. `torch_native` has no drafts of speculative decoding, and no sinks.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from fusionrl.base.cpu_wing import ATTENTION_BACKEND
from fusionrl.config.upstream_flags import add_cpu_attention
from fusionrl.cpu import sglang_models
from fusionrl.cpu.sglang_layers import register_layers, register_sampling

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def register(*, speculates: bool, adapts: bool) -> None:
    """Patch this process, and those forked from it; call it once.

    speculates  with drafts of n-grams
    adapts      it serves adapters (LoRA)
    """
    register_attention()
    name_device()
    register_layers()
    sglang_models.register()
    _sleep_while_paused()
    register_sampling(reads_seeds=not speculates)
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


def register_attention() -> None:
    """Register the backend in this process and in those forked from it. Idempotent."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache import allocation

    add_cpu_attention()
    register_attention_backend(ATTENTION_BACKEND)(create_backend)
    # SGLang runs a Triton kernel here for any backend on a CPU but torch_native; with pages of several tokens alone.
    allocation.get_last_loc_triton = allocation.get_last_loc_torch


def create_backend(runner: ModelRunner) -> TorchNativeAttnBackend:
    """Build the backend of a model, or SGLang's own one for a model that needs it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from fusionrl.cpu import row_products, straight_decode
    from fusionrl.cpu.attention_backend import BatchedAttentionBackend

    row_products.register()
    if isinstance(runner.token_to_kv_pool, SWAKVPool):
        reason = "layers with a sliding window have a cache of their own"
        if getattr(runner.server_args, "speculative_algorithm", None):
            raise ValueError(f"--speculative-algorithm: on a CPU not with this model, as {reason}; leave it out")
        logger.info("Attention backend: torch_native (%s)", reason)
        return TorchNativeAttnBackend(runner)
    logger.info("Attention backend: %s, whole batches at once", ATTENTION_BACKEND)
    backend = BatchedAttentionBackend(runner)
    straight_decode.install(runner, backend)
    return backend
