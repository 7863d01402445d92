"""The parts of families: config.json into the shape, and the rules of a layer by its traits. Pure, without torch.

A new kind of layer enters as a trait of `ModelShape` (`models/shape.py`), with its tensors here in `layer`, with its
fields of TransformerConfig in `trainer/settings.py`, and with its modules in `trainer/layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusionrl.models.families.hf_config import HfConfig
from fusionrl.models.families.rules import Rule

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape


def common(raw: HfConfig) -> dict[str, object]:
    """Fields of `ModelShape` that every family writes alike (transformers 4's and 5's way of writing RoPE)."""
    rope = raw.get("rope_parameters") or {}
    scaling: Mapping[str, object] | None = raw.get("rope_scaling")
    if not scaling and rope.get("rope_type", "default") != "default":
        scaling = rope
    heads = raw["num_attention_heads"]
    return {
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "ffn_hidden_size": raw["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "vocab_size": raw["vocab_size"],
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
        "rope_scaling": scaling or None,
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
    }


def num_experts(raw: HfConfig) -> int:
    """Routed experts of a layer; families and versions of transformers write it under different names."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return raw[next((name for name in names if name in raw), "num_experts")]


def partial_rotary(raw: HfConfig, default: float) -> float:
    """The share of a head's dimensions that rotary embeddings turn."""
    rope = raw.get("rope_parameters") or {}
    return rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or default


def refuse(raw: Mapping[str, object], *names: str) -> None:
    """Raise `ValueError` where config.json switches on something that the family's table does not have."""
    for name in names:
        if raw.get(name):
            raise ValueError(f"{name} is not supported for {raw['model_type']}")


def ends(shape: ModelShape) -> tuple[Rule, list[Rule]]:
    """The embedding, and what comes after the last layer."""
    table = (shape.vocab_size, shape.hidden_size)
    embedding = Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": table}, split="rows")
    norm = Rule("decoder.final_layernorm.weight", {"model.norm.weight": (shape.hidden_size,)})
    if shape.value_head:
        # Under the name that transformers gives it; a folder of a policy has none.
        values = {"score.weight": (1, shape.hidden_size)}
        return embedding, [norm, Rule("value_head.weight", values, optional=True)]
    output = Rule("output_layer.weight", {"lm_head.weight": table}, split="rows")
    return embedding, [norm] if shape.tie_word_embeddings else [norm, output]


@dataclass(frozen=True)
class Names:
    """Hugging Face's names in a family's layers, where they are not Llama's.

    experts  the module of a mixture
    expert   gate, up and down projection of an expert
    shared   the shared expert of a mixture
    gate_up  gate and up of the dense MLP, where checkpoints have them in one tensor
    """

    experts: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    gate_up: str | None = None


LLAMA = Names()


def layer(shape: ModelShape, number: int, names: Names = LLAMA) -> Iterator[Rule]:
    """The rules of decoder layer `number`, by the traits of the shape."""
    to, of = f"decoder.layers.{number}", f"model.layers.{number}"
    yield from norms(shape, number)
    yield from (attention if shape.mla is None else latent_attention)(shape, number)
    if shape.output_norms:
        yield norm(f"{to}.self_attention.output_norm", f"{of}.post_self_attn_layernorm", shape.hidden_size)
    if shape.has_experts(number):
        yield from experts(shape, number, names.experts, names.expert, names.shared)
    else:
        yield from mlp(shape, number, names)
    if shape.output_norms:
        yield norm(f"{to}.mlp.output_norm", f"{of}.post_mlp_layernorm", shape.hidden_size)


def norm(megatron: str, hf: str, size: int) -> Rule:
    """The weight of one RMSNorm."""
    return Rule(f"{megatron}.weight", {f"{hf}.weight": (size,)})


def norms(shape: ModelShape, layer: int) -> Iterator[Rule]:
    """The two norms before attention and before the MLP."""
    to, of = f"decoder.layers.{layer}", f"model.layers.{layer}"
    yield norm(f"{to}.input_layernorm", f"{of}.input_layernorm", shape.hidden_size)
    yield norm(f"{to}.pre_mlp_layernorm", f"{of}.post_attention_layernorm", shape.hidden_size)


def attention(shape: ModelShape, layer: int) -> Iterator[Rule]:
    """Self-attention with grouped queries; biases of q, k, v and norms of q, k where the shape has them."""
    to, of = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    h, d = shape.hidden_size, shape.head_dim
    rows = {"q": shape.num_attention_heads * d, "k": shape.num_query_groups * d, "v": shape.num_query_groups * d}
    weights = {f"{of}.{x}_proj.weight": (size, h) for x, size in rows.items()}
    yield Rule(f"{to}.linear_qkv.weight", weights, "qkv", "rows")
    if shape.attention_bias:
        biases = {f"{of}.{x}_proj.bias": (size,) for x, size in rows.items()}
        yield Rule(f"{to}.linear_qkv.bias", biases, "qkv", "rows")
    if shape.qk_layernorm:
        yield norm(f"{to}.q_layernorm", f"{of}.q_norm", d)
        yield norm(f"{to}.k_layernorm", f"{of}.k_norm", d)
    yield Rule(f"{to}.linear_proj.weight", {f"{of}.o_proj.weight": (h, rows["q"])}, split="columns")


def latent_attention(shape: ModelShape, layer: int) -> Iterator[Rule]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); the down projections stand whole on every rank."""
    mla = shape.mla
    assert mla is not None
    to, of = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    h, heads = shape.hidden_size, shape.num_attention_heads
    q_rows = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    down = {f"{of}.kv_a_proj_with_mqa.weight": (mla.kv_lora_rank + mla.qk_pos_emb_head_dim, h)}
    if mla.q_lora_rank is None:
        yield Rule(f"{to}.linear_q_proj.weight", {f"{of}.q_proj.weight": (q_rows, h)}, split="rows")
    else:
        # Next to each other, and so in one bucket of a push: SGLang joins the two, and drops one that comes alone.
        yield Rule(f"{to}.linear_q_down_proj.weight", {f"{of}.q_a_proj.weight": (mla.q_lora_rank, h)})
    yield Rule(f"{to}.linear_kv_down_proj.weight", down)
    if mla.q_lora_rank is not None:
        yield norm(f"{to}.q_layernorm", f"{of}.q_a_layernorm", mla.q_lora_rank)
        up = {f"{of}.q_b_proj.weight": (q_rows, mla.q_lora_rank)}
        yield Rule(f"{to}.linear_q_up_proj.weight", up, split="rows")
    yield norm(f"{to}.kv_layernorm", f"{of}.kv_a_layernorm", mla.kv_lora_rank)
    up = {f"{of}.kv_b_proj.weight": (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)}
    yield Rule(f"{to}.linear_kv_up_proj.weight", up, split="rows")
    out = {f"{of}.o_proj.weight": (h, heads * mla.v_head_dim)}
    yield Rule(f"{to}.linear_proj.weight", out, split="columns")


def gated_mlp(
    to: str, of: str, hidden: int, ffn: int, names: tuple[str, str, str] = LLAMA.expert, expert: int | None = None
) -> Iterator[Rule]:
    """A gated MLP under Megatron's prefix `to` and Hugging Face's `of`; `names` are gate, up, down."""
    gate, up, down = (f"{of}.{name}.weight" for name in names)
    yield Rule(f"{to}.linear_fc1.weight", {gate: (ffn, hidden), up: (ffn, hidden)}, "concat", "paired_rows", expert)
    yield Rule(f"{to}.linear_fc2.weight", {down: (hidden, ffn)}, "copy", "columns", expert)


def mlp(shape: ModelShape, layer: int, names: Names = LLAMA) -> Iterator[Rule]:
    """The dense MLP of a layer."""
    to, of = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    h, ffn = shape.hidden_size, shape.ffn_hidden_size
    if names.gate_up is None:
        yield from gated_mlp(to, of, h, ffn)
        return
    yield Rule(f"{to}.linear_fc1.weight", {f"{of}.{names.gate_up}.weight": (2 * ffn, h)}, split="paired_rows")
    yield Rule(f"{to}.linear_fc2.weight", {f"{of}.down_proj.weight": (h, ffn)}, split="columns")


def is_expert_layer(shape: ModelShape, layer: int) -> bool:
    """Return whether this layer has experts in place of the dense MLP."""
    return shape.has_experts(layer)


def experts(
    shape: ModelShape,
    layer: int,
    block: str = LLAMA.experts,
    names: tuple[str, str, str] = LLAMA.expert,
    shared: str = LLAMA.shared,
) -> Iterator[Rule]:
    """A mixture of experts with its router, and the shared expert where the shape has one; names as in `Names`."""
    moe = shape.moe
    assert moe is not None
    to, of, h = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.{block}", shape.hidden_size
    yield Rule(f"{to}.router.weight", {f"{of}.gate.weight": (moe.num_experts, h)})
    if moe.expert_bias:
        bias = {f"{of}.gate.e_score_correction_bias": (moe.num_experts,)}
        yield Rule(f"{to}.router.expert_bias", bias, buffer=True)
    for number in range(moe.num_experts):
        local, remote = f"{to}.experts.local_experts.{number}", f"{of}.experts.{number}"
        yield from gated_mlp(local, remote, h, moe.ffn_hidden_size, names, number)
    if moe.shared_ffn_hidden_size:
        yield from gated_mlp(f"{to}.shared_experts", f"{of}.{shared}", h, moe.shared_ffn_hidden_size)
    if moe.shared_gate:
        yield Rule(f"{to}.shared_experts.gate_weight", {f"{of}.{shared}_gate.weight": (1, h)})
