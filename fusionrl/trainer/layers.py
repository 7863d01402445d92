"""The decoder layers of a model by the kinds and traits of its shape: Transformer Engine's, or `local_layers.py`.

A kind of layer (`models/kinds`) enters here with its modules, in the table `FIT`; so does a trait of the shape, whose
modules are in `layer_traits.py`.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from torch import Tensor

from fusionrl.models.kinds import Delta, Full, Grouped, Kind, Latent, Window
from fusionrl.models.shape import ModelShape
from fusionrl.trainer import megatron_core
from fusionrl.trainer.local_attention import SDPACoreAttention
from fusionrl.trainer.local_layers import LocalMLP, LocalNorm, local_block_spec


def block_spec(transformer: TransformerConfig, shape: ModelShape, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Spec of this rank's decoder layers."""
    spec = plain_block_spec(transformer, vp_stage)
    layers = spec.layer_specs or []
    first = get_transformer_layer_offset(transformer, vp_stage=vp_stage)
    fitted: dict[tuple[Kind, Kind], ModuleSpec] = {}
    for place, layer in enumerate(layers):
        kinds = shape.attention[first + place], shape.mlp[first + place]
        if kinds not in fitted:
            fitted[kinds] = fitted_layer(layer, kinds, transformer, shape)
        layers[place] = fitted[kinds]
    return spec


def plain_block_spec(transformer: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The same as Megatron has it for these fields, before the kinds of layers."""
    if transformer.transformer_impl == "local":
        return local_block_spec(transformer, vp_stage)
    return get_gpt_decoder_block_spec(transformer, use_transformer_engine=True, vp_stage=vp_stage)


def fitted_layer(
    layer: ModuleSpec, kinds: tuple[Kind, Kind], transformer: TransformerConfig, shape: ModelShape
) -> ModuleSpec:
    """A copy of Megatron's layer, which is one for all layers, with the modules of these kinds."""
    fitted = copy.deepcopy(layer)
    for kind in kinds:
        FIT.get(type(kind), type(kind).fit)(kind, fitted.submodules, transformer, shape)
    _fit_traits(fitted.submodules, transformer, shape)
    return fitted


def _fit_latent(
    kind: Kind, layer: TransformerLayerSubmodules, transformer: TransformerConfig, shape: ModelShape
) -> None:
    is_plain = transformer.q_lora_rank is None and transformer.transformer_impl != "local"
    if is_plain and layer.self_attention.module is MLASelfAttention:
        from fusionrl.trainer.layer_traits import PlainQuery

        layer.self_attention.module = PlainQuery


def _fit_grouped(
    kind: Kind, layer: TransformerLayerSubmodules, transformer: TransformerConfig, shape: ModelShape
) -> None:
    assert isinstance(kind, Grouped)
    if kind.gated and layer.self_attention.module is SelfAttention:
        from fusionrl.trainer.gated_delta import GatedSelfAttention

        layer.self_attention.module = GatedSelfAttention
    scale, parts = kind.scale(shape), layer.self_attention.submodules
    # Megatron has one scale for all layers.
    own_scale = None if scale == (transformer.softmax_scale or shape.head_dim**-0.5) else scale
    if transformer.transformer_impl == "local":
        fields = {"window": kind.window, "has_sinks": kind.sinks, "own_scale": own_scale}
        parts.core_attention = type("LayerAttention", (SDPACoreAttention,), fields)
    elif own_scale is not None:
        from fusionrl.trainer.layer_traits import OwnScale

        parts.core_attention = type("ScaledAttention", (OwnScale, parts.core_attention), {"own_scale": own_scale})


def _fit_delta(
    kind: Kind, layer: TransformerLayerSubmodules, transformer: TransformerConfig, shape: ModelShape
) -> None:
    from fusionrl.trainer.gated_delta import GatedDelta

    layer.self_attention = ModuleSpec(module=GatedDelta, params={"kind": kind})
    set_norm_apart(layer, transformer)


def set_norm_apart(layer: TransformerLayerSubmodules, transformer: TransformerConfig) -> None:
    """Give the layer a norm before a module in attention's place, whose projection has none.

    Checkpoints of either implementation have it under its own name, and load in the other.
    """
    names = layer.sharded_state_dict_keys_map.items()
    layer.sharded_state_dict_keys_map = {own: saved for own, saved in names if own != "input_layernorm."}
    if transformer.transformer_impl != "local":  # where the norm is a part of attention's projection
        layer.input_layernorm = LocalNorm


# A kind that is not here puts its modules in by itself (`Kind.fit`).
FIT: dict[type[Kind], Callable[[Kind, TransformerLayerSubmodules, TransformerConfig, ModelShape], None]] = {
    Delta: _fit_delta,
    Full: _fit_grouped,
    Latent: _fit_latent,
    Window: _fit_grouped,
}


def _fit_traits(layer: TransformerLayerSubmodules, transformer: TransformerConfig, shape: ModelShape) -> None:
    """Norms of q and k over all heads; norms and scales around attention and MLP."""
    if shape.width_norm:
        from fusionrl.trainer.layer_traits import WidthNorms

        module = layer.self_attention.module
        layer.self_attention.module = type(f"WidthNormed{module.__name__}", (WidthNorms, module), {})
    if not shape.input_norms:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        if transformer.transformer_impl != "local":  # where the norms are parts of the projections
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            megatron_core.mlp_submodules(layer).linear_fc1 = TEColumnParallelLinear
    if shape.output_norms or shape.residual_scale != 1.0:
        from fusionrl.trainer.layer_traits import changed_output

        layer.self_attention.module = changed_output(layer.self_attention.module, shape)
        megatron_core.set_mlp_module(layer, changed_output(LocalMLP, shape))


def finish_layers(model: GPTModel, transformer: TransformerConfig, shape: ModelShape) -> None:
    """Change what Megatron's specs and options cannot express in a model that is built."""
    for name, module in model.named_modules():
        # Not by the layers' spec: Megatron complains of an MLP in it that it does not know.
        if transformer.transformer_impl == "local" and type(module) is MLP:
            if ".experts." not in name:
                module.__class__ = LocalMLP
            elif transformer.add_bias_linear:
                module.linear_fc2.register_forward_hook(_copy_output)
    for name, parameter in model.named_parameters():
        if name.endswith(".softmax_offset"):  # Transformer Engine does not mark it, and the norm would miss a part
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    if shape.embedding_scale != 1.0 and model.pre_process:
        model.embedding.register_forward_hook(partial(_scale_embeddings, shape.embedding_scale))
    if any(isinstance(kind, Grouped) and kind.rope_theta is not None for kind in shape.attention):
        from fusionrl.trainer.layer_traits import use_own_tables

        use_own_tables(model, shape)
    if shape.rope_scaling is not None and not transformer.multi_latent_attention:  # which has an embedding of its own
        from fusionrl.trainer.layer_traits import scale_rope

        scale_rope(model, shape)


def _copy_output(module: torch.nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Copy an output to which Megatron adds a bias in place; torch forbids that of what a custom function returned."""
    return output[0].clone(), output[1]


def _scale_embeddings(scale: float, module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output * torch.tensor(scale, dtype=output.dtype)  # rounded first, as transformers does it
