"""The decoder layers of a model by the kinds and traits of its shape: Transformer Engine's, or the local ones.

A kind of layer (`models/kinds`) enters here with its modules, in the table `FIT`; so does a trait of the shape that
Megatron has no option for.

Megatron-core's own local spec has no norm for sequence parallelism, and an attention that `local_attention.py`
replaces.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from fusionrl.models.kinds import Delta, Full, Grouped, Kind, Latent, Window
from fusionrl.models.kinds.attention import Yarn, is_yarn
from fusionrl.models.shape import ModelShape
from fusionrl.trainer import megatron_core
from fusionrl.trainer.gated_delta import GatedDelta, GatedSelfAttention
from fusionrl.trainer.local_attention import SDPACoreAttention
from fusionrl.trainer.local_layers import ACTIVATIONS, LocalNorm
from fusionrl.trainer.packed_row import PackedLayout


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
        layer.self_attention.module = PlainQuery


def _fit_grouped(
    kind: Kind, layer: TransformerLayerSubmodules, transformer: TransformerConfig, shape: ModelShape
) -> None:
    assert isinstance(kind, Grouped)
    if kind.gated and layer.self_attention.module is SelfAttention:
        layer.self_attention.module = GatedSelfAttention
    scale, parts = kind.scale(shape), layer.self_attention.submodules
    # Megatron has one scale for all layers.
    own_scale = None if scale == (transformer.softmax_scale or shape.head_dim**-0.5) else scale
    if transformer.transformer_impl == "local":
        fields = {"window": kind.window, "has_sinks": kind.sinks, "own_scale": own_scale}
        parts.core_attention = type("LayerAttention", (SDPACoreAttention,), fields)
    elif own_scale is not None:
        parts.core_attention = type("ScaledAttention", (_OwnScale, parts.core_attention), {"own_scale": own_scale})


class _OwnScale:
    """Before an attention of Transformer Engine, which is not a Megatron module: scores have a scale of their own."""

    own_scale: float

    def __init__(self, *args: object, softmax_scale: float | None = None, **kwargs: object) -> None:
        super().__init__(*args, softmax_scale=self.own_scale, **kwargs)  # type: ignore[call-arg]


def _fit_delta(
    kind: Kind, layer: TransformerLayerSubmodules, transformer: TransformerConfig, shape: ModelShape
) -> None:
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
        module = layer.self_attention.module
        layer.self_attention.module = type(f"WidthNormed{module.__name__}", (_WidthNorms, module), {})
    if not shape.input_norms:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        if transformer.transformer_impl != "local":  # where the norms are parts of the projections
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            megatron_core.mlp_submodules(layer).linear_fc1 = TEColumnParallelLinear
    if shape.output_norms or shape.residual_scale != 1.0:
        layer.self_attention.module = _changed_output(layer.self_attention.module, shape)
        megatron_core.set_mlp_module(layer, _changed_output(LocalMLP, shape))


def _changed_output(module: type, shape: ModelShape) -> type:
    """A class whose modules' output is normalised, or scaled, before it is added to the residual."""
    if shape.output_norms:
        module = type(f"Normed{module.__name__}", (_OutputNorm, module), {})
    if shape.residual_scale != 1.0:
        module = type(f"Scaled{module.__name__}", (_OutputScale, module), {"output_scale": shape.residual_scale})
    return module


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
    _use_own_tables(model, shape)
    if not transformer.multi_latent_attention:  # it has an embedding of its own
        scale_rope(model, shape)


def _copy_output(module: torch.nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Copy an output to which Megatron adds a bias in place; torch forbids that of what a custom function returned."""
    return output[0].clone(), output[1]


def _scale_embeddings(scale: float, module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output * torch.tensor(scale, dtype=output.dtype)  # rounded first, as transformers does it


def _use_own_tables(model: GPTModel, shape: ModelShape) -> None:
    """Give layers whose rotary embeddings have another base those in place of the model's."""
    tables: dict[float, _OwnTable] = {}
    for layer in model.decoder.layers:
        kind = shape.attention[layer.layer_number - 1]
        if not isinstance(kind, Grouped) or kind.rope_theta is None:
            continue
        if kind.rope_theta not in tables:
            rope = RotaryEmbedding(
                shape.head_dim,
                shape.rotary_percent,
                rotary_interleaved=shape.rotary_interleaved,
                rotary_base=kind.rope_theta,
                use_cpu_initialization=model.config.use_cpu_initialization,
            )
            tables[kind.rope_theta] = _OwnTable(rope)
        layer.self_attention.register_forward_pre_hook(tables[kind.rope_theta], with_kwargs=True)


class _OwnTable:
    """Before the attention of layers: rotary embeddings of their own, made once for each micro-batch."""

    def __init__(self, rope: RotaryEmbedding) -> None:
        self.rope = rope
        self.last: tuple[Tensor, Tensor] | None = None  # positions, and angles by them

    def __call__(
        self, module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        packed = named["packed_seq_params"]
        assert isinstance(packed, PackedLayout), "packed sequences only"
        angles, positions = self.rope(int(packed.max_seqlen_q), packed_seq=True), packed.positions
        if positions is not None:
            if self.last is None or self.last[0] is not positions:
                self.last = positions, angles.index_select(0, positions)
            angles = self.last[1]
        return inputs, named | {"rotary_pos_emb": angles}


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Spec of this rank's decoder layers: dense or with experts, as `moe_layer_freq` says of each."""
    latent = config.multi_latent_attention
    if latent:
        # The attention asks what its down projections are, and knows a plain one by this name only.
        multi_latent_attention.Linear = DuplicatedLinear

    def layer_spec(num_experts: int | None) -> ModuleSpec:
        """Megatron's local layer, dense or with experts, with the norms and attention of this file in it."""
        spec: ModuleSpec = get_gpt_layer_local_spec(
            num_experts=num_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=latent,
            normalization=config.normalization,
        )
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
        attention = layer.self_attention.submodules
        attention.core_attention = SDPACoreAttention
        if latent:
            attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
            attention.kv_layernorm = LocalNorm
            attention.q_layernorm = LocalNorm if config.q_lora_rank is not None else IdentityOp
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = LocalNorm
        return spec

    has_experts = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    specs = {kind: layer_spec(config.num_moe_experts if kind else None) for kind in set(has_experts)}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [specs[kind] for kind in has_experts[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=LocalNorm)


class DuplicatedLinear(torch.nn.Module):
    """A projection that every tensor-parallel rank holds whole, without bias: the compression of latent attention.

    Megatron's local spec splits it and gathers the result; the positional part of the keys, which all heads share,
    then gets the gradient of its own rank's heads alone, because the backward pass of that gather only cuts. Here the
    weight is whole, as in Transformer Engine's spec: each rank sees its part of the sequence, and the gradients of the
    weight are summed over the ranks with those of the norms. (Without sequence parallelism Megatron would sum the
    gradients of latent attention's norms twice; the plan refuses that.)
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: object) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[..., input] → ([..., output], no bias)."""
        return F.linear(hidden, self.weight), None


class LocalMLP(MLP):
    """Megatron's MLP; one with biases, or with a gate that is not plain, runs Megatron's forward pass."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] → the same shape, and no bias."""
        product = self._product
        if per_token_scale is not None or product is None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        both, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(product(both))

    @property
    def _product(self) -> Callable[[Tensor], Tensor] | None:
        """The gated product, if fusionrl has it and nothing is changed in it."""
        config = self.config
        product = next((ours for gate, ours in ACTIVATIONS.values() if gate is config.activation_func), None)
        is_changed = config.activation_func_clamp_value is not None or config.glu_linear_offset != 0.0
        is_fused = config.use_te_activation_func or config.bias_activation_fusion
        return None if not config.gated_linear_unit or is_changed or is_fused or config.add_bias_linear else product


class _OutputNorm(MegatronModule):
    """Before a Megatron module: its output is normalised before it is added to the residual (GLM-4)."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.output_norm = LocalNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Run the module, and normalise the first tensor that it returns, [s, b, h]."""
        output, bias = super().forward(*args, **kwargs)
        return self.output_norm(output), bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Return the state of a checkpoint. Megatron's MLP asks each of its modules, and a norm has no such method."""
        norm = self._modules.pop("output_norm")
        try:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self._modules["output_norm"] = norm
        return state | sharded_state_dict_default(
            norm,
            f"{prefix}output_norm.",
            sharded_offsets,
            metadata,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )


class _OutputScale(MegatronModule):
    """Before a Megatron module: its output is multiplied by a number (Granite)."""

    output_scale: float

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Run the module, and scale the first tensor that it returns, [s, b, h]."""
        output, bias = super().forward(*args, **kwargs)
        return output * self.output_scale, bias


class _WidthNorm(MegatronModule):
    """RMSNorm over all heads of all tensor-parallel ranks, of which this rank has some.

    Megatron must not take it for one that every rank has whole (`settings.py`: qk_layernorm).
    """

    def __init__(self, config: TransformerConfig, num_heads: int) -> None:
        super().__init__(config)
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.size, self.eps = num_heads * config.kv_channels, config.layernorm_epsilon
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        size = self.size // self.group.size()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: Tensor) -> Tensor:
        """heads [..., heads of this rank, d] → the same shape."""
        rows = heads.flatten(-2).float()
        squares = rows.pow(2).sum(-1, keepdim=True)
        if self.group.size() > 1:
            # The sum is over all ranks, and so is its gradient.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        normed = rows * torch.rsqrt(squares / self.size + self.eps) * self.weight
        return normed.to(heads.dtype).view(heads.shape)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Return the state of a checkpoint: a part of the rows on each tensor-parallel rank."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class _WidthNorms(MegatronModule):
    """Before a Megatron attention: norms of queries and keys over all heads.

    Not by its submodules: there Megatron-core 0.19 refuses norms that its configuration does not have.
    """

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.q_layernorm = _WidthNorm(config, config.num_attention_heads)
        self.k_layernorm = _WidthNorm(config, config.num_query_groups or config.num_attention_heads)


class PlainQuery(MLASelfAttention):
    """Latent attention whose query is not compressed (DeepSeek-V2-Lite), in Transformer Engine's layers.

    Such a model has a norm for keys and values alone. Megatron-core 0.19 takes `qk_layernorm` for both, and fuses a
    norm that no checkpoint has into the query's projection. A Megatron before it never calls what is replaced here.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        classes: dict[str, object] = dict(super()._resolve_qk_norm_config(submodules))
        if self.config.q_lora_rank is None:
            classes["linear_q_proj"] = submodules.linear_q_proj
        return classes


def scale_rope(model: GPTModel, shape: ModelShape) -> None:
    """Change the frequencies of a model that has no latent attention, whose own embedding does it."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return
    rope = model.rotary_pos_emb
    if is_yarn(scaling):
        yarn = Yarn.of(scaling, shape.max_position_embeddings)
        rope.inv_freq = yarn_frequencies(yarn, shape.head_dim, shape.rope_theta).to(rope.inv_freq.device)
        return
    if scaling.get("rope_type", scaling.get("type")) == "linear":
        rope.inv_freq = rope.inv_freq / scaling["factor"]
        return
    # GPTModel's own option fixes three of Llama 3's four numbers; its RotaryEmbedding takes them all.
    rope.inv_freq = rope._apply_scaling(
        rope.inv_freq,
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
    )


def yarn_frequencies(yarn: Yarn, num_dims: int, base: float) -> Tensor:
    """Return the angle by which each pair of dimensions turns from a position to the next, fp32 [num_dims / 2]."""
    powers = base ** (torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims)
    low, high = yarn.ramp(num_dims, base)
    ramp = (torch.arange(num_dims // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    slowed = ramp.clamp(0, 1)
    return (1.0 / (yarn.factor * powers)) * slowed + (1.0 / powers) * (1 - slowed)
