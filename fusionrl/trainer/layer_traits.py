"""Modules of a shape's traits that Megatron has no option for; `layers.py` puts them in where a shape has the trait."""

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from fusionrl.models.kinds import Grouped
from fusionrl.models.kinds.attention import Yarn, is_yarn
from fusionrl.models.shape import ModelShape
from fusionrl.trainer.local_attention import DividedRows
from fusionrl.trainer.local_layers import LocalNorm
from fusionrl.trainer.packed_row import PackedLayout


def changed_output(module: type, shape: ModelShape) -> type:
    """A class whose modules' output is normalised, or scaled, before it is added to the residual."""
    if shape.output_norms:
        module = type(f"Normed{module.__name__}", (OutputNorm, module), {})
    if shape.residual_scale != 1.0:
        module = type(f"Scaled{module.__name__}", (OutputScale, module), {"output_scale": shape.residual_scale})
    return module


class OutputNorm(MegatronModule):
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


class OutputScale(MegatronModule):
    """Before a Megatron module: its output is multiplied by a number (Granite)."""

    output_scale: float

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Run the module, and scale the first tensor that it returns, [s, b, h]."""
        output, bias = super().forward(*args, **kwargs)
        return output * self.output_scale, bias


class WidthNorms(MegatronModule):
    """Before a Megatron attention: norms of queries and keys over all heads.

    Not by its submodules: there Megatron-core 0.19 refuses norms that its configuration does not have.
    """

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.q_layernorm = WidthNorm(config, config.num_attention_heads)
        self.k_layernorm = WidthNorm(config, config.num_query_groups or config.num_attention_heads)


class WidthNorm(DividedRows):
    """RMSNorm over all heads of all tensor-parallel ranks, of which this rank has some.

    Megatron must not take it for one that every rank has whole (`settings.py`: qk_layernorm).
    """

    def __init__(self, config: TransformerConfig, num_heads: int) -> None:
        super().__init__(config)
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.size, self.eps = num_heads * config.kv_channels, config.layernorm_epsilon
        self.add_rows("weight", self.size // self.tp.size())

    def forward(self, heads: Tensor) -> Tensor:
        """heads [..., heads of this rank, d] → the same shape."""
        rows = heads.flatten(-2).float()
        squares = rows.pow(2).sum(-1, keepdim=True)
        if self.tp.size() > 1:
            # The sum is over all ranks, and so is its gradient.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp)
        normed = rows * torch.rsqrt(squares / self.size + self.eps) * self.weight
        return normed.to(heads.dtype).view(heads.shape)


class OwnScale:
    """Before an attention of Transformer Engine, which is not a Megatron module: scores have a scale of their own."""

    own_scale: float

    def __init__(self, *args: object, softmax_scale: float | None = None, **kwargs: object) -> None:
        super().__init__(*args, softmax_scale=self.own_scale, **kwargs)  # type: ignore[call-arg]


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


def use_own_tables(model: GPTModel, shape: ModelShape) -> None:
    """Give layers whose rotary embeddings have another base those in place of the model's."""
    tables: dict[float, OwnTable] = {}
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
            tables[kind.rope_theta] = OwnTable(rope)
        layer.self_attention.register_forward_pre_hook(tables[kind.rope_theta], with_kwargs=True)


class OwnTable:
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


def scale_rope(model: GPTModel, shape: ModelShape) -> None:
    """Change the frequencies of a model that has no latent attention, whose own embedding does it."""
    scaling = shape.rope_scaling
    assert scaling is not None
    kind, rope = scaling.get("rope_type", scaling.get("type", "default")), model.rotary_pos_emb
    if kind == "default":
        return
    if is_yarn(scaling):
        yarn = Yarn.of(scaling, shape.max_position_embeddings)
        rope.inv_freq = yarn_frequencies(yarn, shape.head_dim, shape.rope_theta).to(rope.inv_freq.device)
        return
    if kind == "linear":
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
