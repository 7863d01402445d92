"""Model families: each reads config.json and has the table of Hugging Face and Megatron names. Pure, without torch.

A new family is an entry of `FAMILIES` in one of the files here, or your own file
`plugins/models/<model_type>.py` with a `FAMILY` in it (docs/guides/own-model.md shows how).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from fusionrl.models.families import parts
from fusionrl.models.rules import IGNORED, Family, Published, Rule, Sizes, canonical_name

if TYPE_CHECKING:
    from fusionrl.models.shape import ModelShape

__all__ = [
    "Family",
    "Rule",
    "built_in",
    "canonical_name",
    "get_family",
    "hf_shapes",
    "ignored",
    "kept",
    "model_rules",
    "parts",
    "rule_of",
]

_FILES = ("llama", "vision", "mixtures", "hybrids")
"""The files here with `FAMILIES`, in the order in which they are searched: DeepSeek-V3 with a tower comes before that
without. A run imports no further than to its own."""
_MOVED = ("fusionrl.models.families.rules", "fusionrl.models.families.hf_config")
_MAMBA = "its Mamba layers: Megatron-core's train no packed sequences, and SGLang needs a GPU for them"
_LLAMA4 = "it attends in chunks and scales what experts read; no trainer here does so, and SGLang needs a GPU for it"
_GEMMA4 = "its heads have two sizes, and layers share keys; no trainer here does so, and SGLang needs a GPU for it"
_CAPS = "it caps scores and logits (softcapping), which the trainers' attention does not"
REFUSED = {
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
    **dict.fromkeys(("nemotron_h", "granitemoehybrid", "falcon_h1", "jamba", "mamba2"), _MAMBA),
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    "gemma2": _CAPS,
    "cohere2": "log-probs of SGLang 0.5 and transformers differ by 0.2, so engines and trainers would disagree",
}
"""Model types that users request, and why they are not here. A file in plugins/models goes before."""


def built_in() -> Iterator[Family]:
    """The families of these files, one file imported after the other; of two with a model type the first counts."""
    for file in _FILES:
        yield from importlib.import_module(f"{__name__}.{file}").FAMILIES


@lru_cache(maxsize=32)
def _built_in_family(model_type: str) -> Family | None:
    return next((family for family in built_in() if family.model_type == model_type), None)


@lru_cache(maxsize=8)
def published_family(model_type: str) -> Family | None:
    """The family of a multimodal model's text part, by the whole model's type; None: that is not such a type."""
    for family in built_in():
        if family.model_type == model_type:
            return None
        if family.published is not None and family.published.model_type == model_type:
            return family
    return None


def published_form(model_type: str) -> Published | None:
    """The form of the folders of a multimodal model of this type; None: that is not such a type."""
    family = published_family(model_type)
    return None if family is None else family.published


def get_family(model_type: str) -> Family:
    """The family of config.json's `model_type`."""
    if isinstance(model_type, str) and (found := _built_in_family(model_type)) is not None:
        return found
    module = f"plugins.models.{model_type}"
    try:
        is_there = str(model_type).isidentifier() and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        if isinstance(model_type, str) and model_type in REFUSED:
            raise ValueError(f"model_type {model_type!r} is not supported: {REFUSED[model_type]}")
        known = dict.fromkeys(family.model_type for family in built_in())
        known |= dict.fromkeys(family.published.model_type for family in built_in() if family.published is not None)
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(known)}, "
            "and what has a file in plugins/models"
        )
    try:
        family = getattr(importlib.import_module(module), "FAMILY", None)
    except ModuleNotFoundError as error:
        if error.name in _MOVED:  # an earlier version had it there
            moved = f"plugins/models/{model_type}.py: {error.name} is now fusionrl.models.rules"
            raise ValueError(f"{moved}; docs/guides/own-model.md shows how to write it") from error
        raise
    if not isinstance(family, Family) or family.model_type != model_type:
        raise ValueError(f"plugins/models/{model_type}.py has no FAMILY = Family({model_type!r}, …)")
    return family


@lru_cache(maxsize=4)
def model_rules(shape: ModelShape) -> dict[str, Rule]:
    """Megatron name → rule, for the whole model, in the order of export. Not to be changed: it is kept."""
    family = get_family(shape.model_type)
    embedding, last = parts.ends(shape)
    layers = [rule for number in range(shape.num_layers) for rule in family.layer(shape, number)]
    further = [rule for number in range(shape.mtp_layers) for rule in parts.mtp(shape, number, family)]
    tower = [] if shape.vision is None else list(shape.vision.rules())
    every = [*tower, embedding, *layers, *last, *further]
    rules = {rule.megatron: rule for rule in every}
    assert len(rules) == len(every), "two rules for one tensor"
    return rules


def rule_of(name: str, shape: ModelShape) -> Rule:
    """The rule of the tensor `name`; the copy of a tied embedding on a last stage has the embedding's."""
    rules = model_rules(shape)
    if name not in rules and name == "output_layer.weight" and shape.tie_word_embeddings:
        return Rule(name, rules["embedding.word_embeddings.weight"].hf, split="rows")
    return rules[name]


def hf_shapes(shape: ModelShape) -> dict[str, Sizes]:
    """Hugging Face name → shape, for the whole model, in the order of export."""
    return {name: sizes for rule in model_rules(shape).values() for name, sizes in rule.stored.items()}


def kept(shape: ModelShape) -> re.Pattern[str] | None:
    """Names that its family's checkpoints carry and no tensor here is made of, so that saving passes them through."""
    extra = None if shape.value_head else _carried(shape)
    return None if extra is None else re.compile(extra)


def ignored(shape: ModelShape) -> re.Pattern[str]:
    """Names that a checkpoint may have though no tensor here is made of them."""
    extra = _carried(shape)
    return re.compile(IGNORED if extra is None else f"{IGNORED}|{extra}")


def _carried(shape: ModelShape) -> str | None:
    family, count = get_family(shape.model_type), shape.num_layers
    numbers = range(count, count + (family.mtp.most if family.mtp else 1))
    return family.ignored and family.ignored.format(num_layers=count, further="|".join(map(str, numbers)))
