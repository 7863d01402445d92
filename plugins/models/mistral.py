"""Mistral 7B and Nemo (dense, without a sliding window): a whole family in one file, as an example for your own.

A family says two things: how config.json is read, and which Hugging Face tensors make up each Megatron tensor. Reading
and saving checkpoints, weight pushes, layouts, memory estimates and verification follow from these.

The name of the file is config.json's `model_type`. Nothing else has to be registered.
"""

from collections.abc import Iterator

from fusionrl.models.families import parts
from fusionrl.models.rules import Family, HfConfig, Rule
from fusionrl.models.shape import ModelShape


def read(raw: HfConfig) -> dict[str, object]:
    """Return the fields of `ModelShape`; `parts.common` has those that all families write alike.

    Raises:
        ValueError: config.json switches something on that the trainers do not compute. A model that trains with a part
            left out would train wrongly, so refuse by name what the rules below do not have.
    """
    parts.refuse_window(raw)
    parts.refuse(raw, "attention_bias", "mlp_bias")
    # Nemo's heads are smaller than hidden_size / num_attention_heads; `common` reads head_dim where it is written.
    return parts.common(raw)


def layer(shape: ModelShape, number: int) -> Iterator[Rule]:
    """Yield a rule for each Megatron tensor of layer `number`.

    The norms and the MLP are parts that exist. Attention is written out here, to show what a rule says; it is what
    `parts.attention(shape, number)` yields.
    """
    to, of = f"decoder.layers.{number}", f"model.layers.{number}"
    hidden, size = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * size, shape.num_query_groups * size

    yield from parts.norms(shape, number)
    # Three tensors of Hugging Face's in one of Megatron's, with the queries of each group before its keys and values
    # ("grouped"); tensor-parallel ranks have whole groups of its rows.
    yield Rule(
        f"{to}.self_attention.linear_qkv.weight",
        {
            f"{of}.self_attn.q_proj.weight": (queries, hidden),
            f"{of}.self_attn.k_proj.weight": (keys, hidden),
            f"{of}.self_attn.v_proj.weight": (keys, hidden),
        },
        "grouped",
        "rows",
        groups=shape.num_query_groups,
    )
    # One tensor, copied; tensor-parallel ranks have parts of its columns.
    yield Rule(
        f"{to}.self_attention.linear_proj.weight", {f"{of}.self_attn.o_proj.weight": (hidden, queries)}, split="columns"
    )
    yield from parts.mlp(shape, number)


# What transformers' class takes for fields that config.json lacks, where Llama's takes something else.
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
FAMILY = Family("mistral", read, layer, defaults=DEFAULTS)
