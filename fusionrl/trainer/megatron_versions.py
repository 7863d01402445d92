"""The differences between the supported versions of Megatron-core, 0.16.1 and 0.19.x. All of them are here.

| what | 0.16.1 | 0.19.x |
|---|---|---|
| triton | not imported | imported at module level: a stand-in answers where CUDA is missing |
| asynchronous saving | one way | two ways, `async_strategy`; "mcore" is the one that needs no other package |
| an MLP in a layer's spec | a `ModuleSpec` | a function that builds it |
| queries that are not compressed (MLA) | a norm of them is ignored | refused; their projection must be fused with one |
| norms of queries and keys in a spec, without `qk_layernorm` | are built | are refused |
| layers of multi-token prediction | have a `transformer_layer` | have a `mtp_model_layer`, and get a mask of padding |
| groups of parameters in a checkpoint | found by what they hold | by their rates, too: a resume with others fails |
| checkpoint values outside shards | common.pt | a shard, but common.pt where that is: it must be among the files |
| the backend in a checkpoint's metadata.json | checked | not read: `trainer/checkpoint.py` checks it |
| what makes a storage of a pickle | torch's function | its own, which SGLang refuses: `weight_payload.py` renames it |
| names of Transformer Engine without it | some are missing | others are missing |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_latent_attention import QKNormConfigResolver
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

_GROUP_CONTENT = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


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

    def projection(self: QKNormConfigResolver, module_spec: ModuleSpec | type, module_name: str) -> object:
        if module_name == "linear_q_proj" and self.config.transformer_impl == "local":
            return module_spec
        return fused(self, module_spec, module_name)

    resolver._mla_fused_linear_or_default = projection


@contextmanager
def groups_by_content() -> Iterator[None]:
    """Let a checkpoint's groups of parameters be found by what they hold, and not by rates, which flags may change."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    modules: tuple[Any, ...] = (optimizer, distrib_optimizer)  # each has the name as its own
    before = optimizer.param_group_identifier_keys
    try:
        for module in modules:
            module.param_group_identifier_keys = _GROUP_CONTENT
        yield
    finally:
        for module in modules:
            module.param_group_identifier_keys = before


def save_request(state: Mapping[str, object], folder: str, metadata: Mapping[str, object]) -> AsyncRequest:
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


def mlp_submodules(layer: TransformerLayerSubmodules) -> MLPSubmodules:
    """Submodules of the MLP in a layer's submodules."""
    from megatron.core.transformer import ModuleSpec

    return layer.mlp.submodules if isinstance(layer.mlp, ModuleSpec) else layer.mlp.keywords["submodules"]


def set_mlp_module(layer: TransformerLayerSubmodules, module: type[MLP]) -> None:
    """Make `module` the class of the MLP in a layer's submodules."""
    from megatron.core.transformer import ModuleSpec

    if isinstance(layer.mlp, ModuleSpec):
        layer.mlp.module = module
    else:
        layer.mlp = functools.partial(module.as_mlp_submodule, *layer.mlp.args, **layer.mlp.keywords)
