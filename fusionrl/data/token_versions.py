"""Weight versions of tokens: from engines, per token, and from functions for slime, one text a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

UNKNOWN_VERSION = -1  # in weight_versions: it is not known which weights sampled the token


def names_turns(versions: object) -> bool:
    """Return whether weight versions end as slime's do, with one text for each turn: [] does so, too."""
    return isinstance(versions, list) and (not versions or isinstance(versions[-1], str))


def split_versions(versions: object) -> tuple[Sequence[int] | np.ndarray, list[str]]:
    """Return the versions of tokens, and the texts of turns that a function has appended to them."""
    if not isinstance(versions, list):
        return (np.zeros(0, np.int32) if versions is None else np.asarray(versions)), []
    end = next((place for place, version in enumerate(versions) if isinstance(version, str)), len(versions))
    return versions[:end], versions[end:]


def as_version(version: object) -> int:
    """The pushed version of what an engine says; what it calls a checkpoint that it loaded itself is version 0.

    A version is counted from 0 by the pushes: a longer number is a name, too.
    """
    text = str(version)
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else 0


def token_versions(meta_info: Mapping[str, object], count: int) -> np.ndarray:
    """[count] int32: the weight version of each token of an answer from SGLang's /generate; -1: not given.

    `weight_versions` are spans over the answer's tokens, where weights changed meanwhile; else there is one
    `weight_version`. Tokens that the caller cut off at the end have none.
    """
    versions = np.full(count, UNKNOWN_VERSION, np.int32)
    if "weight_version" in meta_info:
        versions[:] = as_version(meta_info["weight_version"])
    start = 0
    spans = meta_info.get("weight_versions")
    for span in spans if isinstance(spans, list | tuple) else ():
        end = int(span["end"])
        versions[start:end] = as_version(span["version"])
        start = end
    return versions


def extended_versions(held: Any, num_held: int, new: np.ndarray) -> np.ndarray | list[Any]:
    """Return the versions of a response with those of further tokens.

    Texts of turns stay behind them: `rollout.weight_versions` finds the tokens that they are of.

    Args:
        held: `weight_versions`, as a sample has them.
        num_held: tokens of the response so far.
        new: [n] int32
    """
    if held is None and not num_held:
        return new
    known, texts = split_versions(held) if held is None or names_turns(held) else (held, [])
    before = np.asarray(known[:num_held], np.int32)
    missing = np.full(num_held - len(before), UNKNOWN_VERSION, np.int32)
    joined = np.concatenate([before, missing, new])
    return [*joined.tolist(), *texts] if texts else joined
