"""The decoder layers of a model by the traits of its shape: Transformer Engine's, or the local ones of this file.

A new kind of layer enters here with its modules, in `settings.py` with its fields of TransformerConfig, and in
`models/families/parts.py` with its tensors.

Megatron-core's own local spec has no norm for sequence parallelism, and an attention that `local_attention.py`
replaces.
"""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from fusionrl.base import cpu_wing
from fusionrl.models.shape import ModelShape
from fusionrl.models.yarn import Yarn, is_yarn
from fusionrl.trainer import megatron_versions
from fusionrl.trainer.local_attention import SDPACoreAttention
from fusionrl.trainer.swiglu import swiglu


def block_spec(transformer: TransformerConfig, shape: ModelShape, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Spec of this rank's decoder layers."""
    is_local = transformer.transformer_impl == "local"
    if is_local:
        spec = local_block_spec(transformer, vp_stage)
    else:
        spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=True, vp_stage=vp_stage)
    has_plain_query = shape.mla is not None and shape.mla.q_lora_rank is None and not is_local
    for layer in spec.layer_specs or []:
        attention = layer.submodules.self_attention
        if has_plain_query and attention.module is MLASelfAttention:
            attention.module = PlainQuery
        if shape.output_norms:
            attention.module = NormedSelfAttention
            megatron_versions.set_mlp_module(layer.submodules, NormedMLP)
    return spec


def finish_layers(model: GPTModel, transformer: TransformerConfig, shape: ModelShape) -> None:
    """Change what Megatron's specs and options cannot express in a model that is built."""
    for name, module in model.named_modules():
        # Not by the layers' spec: Megatron complains of an MLP in it that it does not know.
        if transformer.transformer_impl == "local" and type(module) is MLP and ".experts." not in name:
            module.__class__ = LocalMLP
    if shape.mla is None:  # latent attention has an embedding of its own
        scale_rope(model, shape)


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


class LocalNorm(torch.nn.Module):
    """Builds an RMSNorm, torch's on a GPU, its weight marked for the gradient all-reduce of sequence parallelism."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        assert config.normalization == "RMSNorm", config.normalization
        kind = torch.nn.RMSNorm
        if cpu_wing.lacks_cuda():
            from fusionrl.cpu.row_norm import RowNorm as kind
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


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
    """Megatron's MLP; one with biases, or with another gate than plain SiLU, runs Megatron's forward pass."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] → the same shape, and no bias."""
        if per_token_scale is not None or not self._is_plain:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        both, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(both))

    @property
    def _is_plain(self) -> bool:
        config = self.config
        is_silu = config.gated_linear_unit and config.activation_func is F.silu
        is_changed = config.activation_func_clamp_value is not None or config.glu_linear_offset != 0.0
        is_fused = config.use_te_activation_func or config.bias_activation_fusion
        return is_silu and not (is_changed or is_fused or config.add_bias_linear)


class _OutputNorm(MegatronModule):
    """Before a Megatron module: its output is normalised before it is added to the residual (GLM-4)."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.output_norm = LocalNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Run the module, and normalise the first tensor that it returns, [s, b, h]."""
        output, bias = super().forward(*args, **kwargs)
        return self.output_norm(output), bias


class NormedSelfAttention(_OutputNorm, SelfAttention):
    """Self-attention with a norm of its output."""


class NormedMLP(_OutputNorm, LocalMLP):
    """An MLP with a norm of its output."""


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
