"""An attention backend for SGLang's engines on a CPU, registered with SGLang from outside.

SGLang's `torch_native` computes one request at a time: a decode step of 256 requests and 4 layers is 1,024 times the
same dozen small calls. `ATTENTION_BACKEND` attends the whole batch in a few calls a layer (`batched_attention.py`). It
is a subclass of `torch_native` and leaves to it encoders and cross attention, and a separate cache for layers with a
sliding window. `torch_native` has no drafts of speculative decoding, and no sinks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fusionrl.base.cpu_wing import ATTENTION_BACKEND
from fusionrl.config.upstream_flags import add_cpu_attention

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend in this process and in those forked from it. Idempotent."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache import allocation

    add_cpu_attention()
    register_attention_backend(ATTENTION_BACKEND)(create)
    # SGLang runs a Triton kernel here for any backend on a CPU but torch_native; with pages of several tokens alone.
    allocation.get_last_loc_triton = allocation.get_last_loc_torch


def create(runner: ModelRunner) -> TorchNativeAttnBackend:
    """Build the backend of a model, or SGLang's own one for a model that needs it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from fusionrl.cpu import straight_decode
    from fusionrl.cpu.attention_backend import BatchedAttentionBackend

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
