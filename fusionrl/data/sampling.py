"""How the tokens of a response were sampled: their temperatures, their weight versions, and what changed the policy's
distribution.

Trainers score with `Sample.temperature`. One number applies to the whole response. Turns of several temperatures make
it an array, one number for each token; tokens that were appended after the last turn have the last one. NaN: not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fusionrl.data.sample import Sample


CHANGED = "sampling_changed"  # in a sample's metadata: sampling parameters that changed the distribution
# SGLang's parameters, with the value that changes nothing. top_p, top_k and min_p cut the tail off, and the engine's
# log-probs are those of the whole distribution; with the others they are those of the changed one.
_UNCHANGED: dict[str, tuple[object, ...]] = {
    "top_p": (1, 1.0),
    "top_k": (-1, 1 << 30),
    "min_p": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_new_tokens": (0,),
    **dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "watermark"), ("", {})),
}
GREEDY_BELOW = 1e-6  # SGLang takes the likeliest token below it, and gives log-probs of temperature 1


def scored_at(temperature: object) -> float:
    """Return the temperature of an engine's log-probs for a request with `temperature` (SGLang's default: 1).

    Raises:
        ValueError: it is not a finite number of at least 0.
    """
    value = 1.0 if temperature is None else temperature
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value < np.inf:
        raise ValueError(f"the temperature {temperature!r} is not a finite number of at least 0")
    return 1.0 if value < GREEDY_BELOW else float(value)


def changes_of(params: Mapping[str, object]) -> list[str]:
    """Return the names of the sampling parameters by which tokens do not come from the policy's distribution."""
    changed = [
        name for name, neutral in _UNCHANGED.items() if params.get(name) is not None and params[name] not in neutral
    ]
    temperature = params.get("temperature")
    is_greedy = isinstance(temperature, int | float) and temperature < GREEDY_BELOW
    return [*changed, "temperature"] if is_greedy else changed


def note_request(sample: Sample, start: int, params: Mapping[str, object]) -> None:
    """Note that the response tokens of `sample` from `start` on were sampled by a request with `params`."""
    note_temperature(sample, start, params.get("temperature"))
    if changes := changes_of(params):
        note_changes(sample, changes)


def note_changes(sample: Sample, changes: Iterable[str]) -> None:
    """Note in the metadata which sampling parameters changed the distribution of a sample's tokens."""
    known = (sample.metadata or {}).get(CHANGED) or []
    sample.metadata = {**(sample.metadata or {}), CHANGED: sorted({*known, *changes})}


def note_temperature(sample: Sample, start: int, temperature: object) -> None:
    """Note that the response tokens of `sample` from `start` on were sampled by a request with `temperature`."""
    value = scored_at(temperature)
    held: Any = sample.temperature
    if start == 0 or (np.ndim(held) == 0 and held == value):
        sample.temperature = value
        return
    per_token = np.full(sample.response_length, np.nan, np.float32)
    if held is not None:  # tokens of tools stand behind those that were noted: they have the temperature before
        earlier = np.atleast_1d(np.asarray(held, np.float32))
        per_token[: len(earlier)], per_token[len(earlier) : start] = earlier[: len(per_token)], earlier[-1]
    per_token[start:] = value
    sample.temperature = per_token


def temperatures_of(sample: Sample, default: float) -> np.ndarray | None:
    """[response_length] fp32 temperatures of a sample; None where all are `default`, that of unknown tokens.

    Raises:
        ValueError: a temperature is not a positive number; names the sample.
    """
    held: Any = sample.temperature
    if held is None or (np.ndim(held) == 0 and held == default):
        return None
    try:
        known = np.atleast_1d(np.asarray(held, np.float32))
        values = np.full(sample.response_length, known[-1], np.float32)
        values[: len(known)] = known[: len(values)]
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"sample {sample.index}: temperature {held!r:.80}: {error}") from error
    values[np.isnan(values)] = default
    if not ((values > 0) & np.isfinite(values)).all():
        raise ValueError(
            f"sample {sample.index}: temperature {held!r:.80} must be above 0, as log-probs are scored at it"
        )
    return None if (values == np.float32(default)).all() else values


# ------------------------------------------------------------------------------------------------ weight versions
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
