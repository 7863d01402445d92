"""The differences between the supported versions of Megatron-core, 0.16.1 and 0.19.x. All of them are here.

| what | 0.16.1 | 0.19.x |
|---|---|---|
| triton | not imported | imported at module level: a stand-in answers where CUDA is missing |
| asynchronous saving | one way | two ways, `async_strategy`; "mcore" is the one that needs no other package |
| an MLP in a layer's spec | a `ModuleSpec` | a function that builds it |
| queries that are not compressed (MLA) | a norm of them is ignored | refused; their projection must be fused with one |
| names of Transformer Engine without it | some are missing | others are missing |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any


def before_import() -> None:
    """Let megatron.core be imported on a machine without CUDA, which need not have triton."""
    from fusionrl.upstream import cpu_sglang

    cpu_sglang.install()


def without_te() -> None:
    """Mend names that Megatron-core uses, but has only with Transformer Engine; nothing where that is there."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("TELinear", (), {})
    resolver = getattr(multi_latent_attention, "QKNormConfigResolver", None)
    if resolver is None or hasattr(resolver, "_fused_or_default"):
        return
    fused = resolver._fused_or_default = resolver._mla_fused_linear_or_default

    def projection(self: Any, module_spec: Any, module_name: str) -> object:
        if module_name == "linear_q_proj" and self.config.transformer_impl == "local":
            return module_spec
        return fused(self, module_spec, module_name)

    resolver._mla_fused_linear_or_default = projection


def save_request(state: Mapping[str, object], folder: str, metadata: Mapping[str, object]) -> Any:
    """Megatron's AsyncRequest for saving `state` in `folder`: planned over all ranks, nothing of it written yet."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    takes = inspect.signature(dist_checkpointing.save).parameters
    more = {"async_strategy": "mcore"} if "async_strategy" in takes else {}
    return dist_checkpointing.save(
        state,
        folder,
        get_default_save_sharded_strategy(),
        async_sharded_save=True,
        content_metadata=dict(metadata),
        **more,
    )


def set_mlp_module(layer: Any, module: Any) -> None:
    """Make `module` the class of the MLP in a layer's submodules."""
    from megatron.core.transformer import ModuleSpec

    if isinstance(layer.mlp, ModuleSpec):
        layer.mlp.module = module
    else:
        layer.mlp = functools.partial(module.as_mlp_submodule, *layer.mlp.args, **layer.mlp.keywords)
