"""Model families: each reads config.json and has the table of Hugging Face and Megatron names. Pure, without torch.

A new family is an entry of `FAMILIES` in `llama.py` or `mixtures.py`, or your own file
`plugins/models/<model_type>.py` with a `FAMILY` in it (docs/guides/models.md shows how).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from fusionrl.models.families import llama, mixtures, parts
from fusionrl.models.families.rules import IGNORED, Family, Rule, Sizes, canonical_name

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape

__all__ = ["Family", "Rule", "canonical_name", "get_family", "hf_shapes", "ignored", "model_rules", "rule_of"]

BUILT_IN = {family.model_type: family for family in (*llama.FAMILIES, *mixtures.FAMILIES)}


def get_family(model_type: str) -> Family:
    """The family of config.json's `model_type`."""
    if isinstance(model_type, str) and model_type in BUILT_IN:
        return BUILT_IN[model_type]
    module = f"plugins.models.{model_type}"
    if not isinstance(model_type, str) or not model_type.isidentifier() or not _is_there(module):
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(BUILT_IN)}, "
            "and what has a file in plugins/models"
        )
    family = getattr(importlib.import_module(module), "FAMILY", None)
    if not isinstance(family, Family) or family.model_type != model_type:
        raise ValueError(f"plugins/models/{model_type}.py has no FAMILY = Family({model_type!r}, …)")
    return family


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@lru_cache(maxsize=4)
def model_rules(shape: ModelShape) -> dict[str, Rule]:
    """Megatron name → rule, for the whole model, in the order of export. Not to be changed: it is kept."""
    family = get_family(shape.model_type)
    embedding, last = parts.ends(shape)
    layers = [rule for number in range(shape.num_layers) for rule in family.layer(shape, number)]
    rules = {rule.megatron: rule for rule in (embedding, *layers, *last)}
    assert len(rules) == len(layers) + 1 + len(last), "two rules for one tensor"
    return rules


def rule_of(name: str, shape: ModelShape) -> Rule:
    """The rule of the tensor `name`; the copy of a tied embedding on a last stage has the embedding's."""
    rules = model_rules(shape)
    if name not in rules and name == "output_layer.weight" and shape.tie_word_embeddings:
        return Rule(name, rules["embedding.word_embeddings.weight"].hf, split="rows")
    return rules[name]


def hf_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Hugging Face name → shape, for the whole model, in the order of export."""
    return {name: sizes for rule in model_rules(shape).values() for name, sizes in rule.hf.items()}


def ignored(shape: ModelShape) -> re.Pattern[str]:
    """Names that a checkpoint may have though no tensor here is made of them."""
    extra = get_family(shape.model_type).ignored
    more = "|" + extra.format(num_layers=shape.num_layers) if extra else ""
    return re.compile(IGNORED + more)
