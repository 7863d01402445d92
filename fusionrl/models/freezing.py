"""Which tensors of a model are not trained, by patterns of their names. Pure, without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from functools import lru_cache

from fusionrl.models import families
from fusionrl.models.rules import VISION
from fusionrl.models.shape import ModelShape

FREEZE, ONLY, TOWER = "--freeze-params-name-list", "--only-train-params-name-list", "--freeze-vision"


@lru_cache(maxsize=8)
def frozen_tensors(
    shape: ModelShape, freeze: tuple[str, ...], only: tuple[str, ...], freezes_vision: bool
) -> frozenset[str]:
    """Return the Megatron names of the parameters that are not trained.

    A pattern is searched for in a tensor's Megatron name and in its Hugging Face names.

    freeze, only    patterns of those that are not trained, or of those that alone are
    freezes_vision  no tensor of the vision tower is

    Raises:
        ValueError: both lists, a pattern that is malformed or finds no parameter, or no parameter is left.
    """
    if freeze and only:
        raise ValueError(f"{FREEZE} and {ONLY} exclude each other; give one of them")
    names = {
        rule.megatron: (rule.megatron, *rule.hf) for rule in families.model_rules(shape).values() if not rule.buffer
    }
    frozen = {name for name in names if freezes_vision and name.startswith(VISION)}
    frozen |= _found(names, freeze, FREEZE)
    frozen |= names.keys() - _found(names, only, ONLY) if only else set()
    if len(frozen) == len(names):
        given = [flag for flag, is_given in ((FREEZE, freeze), (ONLY, only), (TOWER, freezes_vision)) if is_given]
        raise ValueError(f"{' and '.join(given)}: no parameter is left to train")
    return frozenset(frozen)


def frozen_names(shape: ModelShape, frozen: Set[str]) -> frozenset[str]:
    """Return the Hugging Face names of the tensors of which no part is trained."""
    rules = families.model_rules(shape)
    trained = {hf for name, rule in rules.items() if name not in frozen for hf in rule.hf}
    return frozenset(hf for name in frozen for hf in rules[name].hf) - trained


def _found(names: dict[str, tuple[str, ...]], patterns: Sequence[str], flag: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise ValueError(f"{flag} {pattern}: no regular expression ({error})") from error
        matches = {name for name, spellings in names.items() if any(search(one) for one in spellings)}
        if not matches:
            raise ValueError(f"{flag} {pattern}: no parameter has such a name; one of them is {next(iter(names))}")
        found |= matches
    return found
