"""The parts of families: config.json into the shape, and the rules of a layer by its kinds. Pure, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fusionrl.models.rules import LLAMA, MTP, Family, HfConfig, MtpNames, Names, Rule, norm

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape


NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


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
        "rope_theta": rope_theta(raw),
        "rope_scaling": scaling or None,
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
    }


def rope_theta(raw: HfConfig) -> float:
    """The base of rotary embeddings."""
    rope: HfConfig = raw.get("rope_parameters") or {}
    base: float = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    return base


def num_experts(raw: HfConfig) -> int:
    """Routed experts of a layer; families and versions of transformers write it under different names."""
    return raw[next((name for name in NUM_EXPERTS if name in raw), NUM_EXPERTS[0])]


def partial_rotary(raw: HfConfig, default: float) -> float:
    """The share of a head's dimensions that rotary embeddings turn."""
    rope = raw.get("rope_parameters") or {}
    return rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or default


def refuse(raw: Mapping[str, object], *names: str) -> None:
    """Raise `ValueError` where config.json switches on something that the family's table does not have."""
    for name in names:
        if raw.get(name):
            raise ValueError(f"{name} is not supported for {raw['model_type']}")


def refuse_window(raw: HfConfig) -> None:
    """Raise `ValueError` for a window of attention that is shorter than the longest text."""
    window, longest = raw.get("sliding_window"), raw.get("max_position_embeddings", 0)
    if window is not None and window < longest:
        raise ValueError(
            f"sliding_window {window} is not supported for {raw['model_type']}: SGLang ignores it and attends to all"
            f" {longest} positions; a model with sliding_window null is"
        )


def window_size(raw: HfConfig, types: list[str], default: int) -> int:
    """Tokens that layers of the type sliding_attention see. Raises ValueError: there are such, and no number of tokens.

    default: where config.json lacks sliding_window.
    """
    size = raw.get("sliding_window", default)
    if "sliding_attention" in types and (not isinstance(size, int) or size <= 0):
        raise ValueError(
            f"sliding_window {size!r} is not supported for {raw['model_type']} with layers of sliding_attention;"
            " write a number of tokens, or layer_types of full_attention alone"
        )
    return size or default


def rope_of(raw: HfConfig, layer_type: str) -> HfConfig:
    """The rotary embeddings of layers of this type, as transformers 5 nests them; empty where they are not nested."""
    nested: HfConfig | None = (raw.get("rope_parameters") or {}).get(layer_type)
    return nested or {}


def layer_types(raw: HfConfig, other: str, every: int) -> list[str]:
    """The type of each layer; where config.json does not list them, every so many has full attention."""
    count = raw["num_hidden_layers"]
    usual = [other if (layer + 1) % every else "full_attention" for layer in range(count)]
    types: list[str] = raw.get("layer_types") or usual
    if unknown := sorted(set(types) - {other, "full_attention"}):
        raise ValueError(f"layer_types {', '.join(unknown)} are not supported for {raw['model_type']}")
    return types


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


def layer(shape: ModelShape, number: int, names: Names = LLAMA) -> Iterator[Rule]:
    """The rules of decoder layer `number`, by its kinds and the norms of the shape."""
    to, of, h = f"decoder.layers.{number}", f"model.layers.{number}", shape.hidden_size
    if shape.input_norms:
        yield from norms(shape, number, names)
    yield from attention(shape, number, names)
    if shape.output_norms:
        yield norm(f"{to}.self_attention.output_norm", f"{of}.{names.norms[1]}", h)
    yield from mlp(shape, number, names)
    if shape.output_norms:
        yield norm(f"{to}.mlp.output_norm", f"{of}.{names.norms[3]}", h)


def norms(shape: ModelShape, number: int, names: Names = LLAMA) -> Iterator[Rule]:
    """The two norms before attention and before the MLP."""
    to, of = f"decoder.layers.{number}", f"model.layers.{number}"
    yield norm(f"{to}.input_layernorm", f"{of}.{names.norms[0]}", shape.hidden_size)
    yield norm(f"{to}.pre_mlp_layernorm", f"{of}.{names.norms[2]}", shape.hidden_size)


def attention(shape: ModelShape, number: int, names: Names = LLAMA) -> Iterator[Rule]:
    """The attention of decoder layer `number`, of whatever kind."""
    return shape.attention[number].rules(shape, number, names)


def mlp(shape: ModelShape, number: int, names: Names = LLAMA) -> Iterator[Rule]:
    """The MLP of decoder layer `number`, dense or of experts."""
    return shape.mlp[number].rules(shape, number, names)


def mtp(shape: ModelShape, number: int, family: Family) -> Iterator[Rule]:
    """The rules of layer `number` of multi-token prediction: a decoder layer with what leads into it and out of it."""
    assert family.mtp is not None
    place, h = shape.num_layers + number, shape.hidden_size
    prefix, *ends = (name.format(layer=place, number=number) for name in (family.mtp.layer, *family.mtp.ends))
    first, second, both, output = ends
    yield norm(f"{MTP}{number}.enorm", first, h)
    yield norm(f"{MTP}{number}.hnorm", second, h)
    yield Rule(f"{MTP}{number}.eh_proj.weight", {f"{both}.weight": (h, 2 * h)}, split="rows")
    for rule in family.layer(shape.longer, place):
        hf = {name: name.replace(f"model.layers.{place}", prefix, 1) for name in rule.hf}
        yield replace(
            rule,
            megatron=rule.megatron.replace(f"decoder.layers.{place}", f"{MTP}{number}.transformer_layer", 1),
            hf={hf[name]: sizes for name, sizes in rule.hf.items()},
            sections={hf[name]: sizes for name, sizes in rule.sections.items()},
        )
    yield norm(f"{MTP}{number}.final_layernorm", output, h)


# DeepSeek-V3's: further layers of the decoder by their names, with copies of the embedding and the output layer.
APPENDED = MtpNames(
    "model.layers.{layer}",
    (
        "model.layers.{layer}.enorm",
        "model.layers.{layer}.hnorm",
        "model.layers.{layer}.eh_proj",
        "model.layers.{layer}.shared_head.norm",
    ),
    most=8,
)
