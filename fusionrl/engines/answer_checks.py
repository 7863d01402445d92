"""Check every answer of an engine against its request. Pure: no sockets, no processes.

Each function raises AnswerError, with the field and its value, for what it refuses.
"""

from __future__ import annotations

import binascii
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

LARGEST_LOG_PROB = 1e-3  # log-softmax in bf16 rounds a certain token's log-prob to a little over 0
SMALLEST_LOG_PROB = -1e5  # below, exp of the difference to another log-prob overflows
DEFAULT_NEW_TOKENS = 128  # SGLang's own, where a request names none
_BASE_BYTES = 4 << 20
_BYTES_PER_TOKEN = 1024  # about 45 are usual: a log-prob, an id, and its text, which a user may ask for
_BYTES_PER_WIDE_TOKEN = 1 << 20  # with hidden states, or the log-probs of many tokens in each place
_NUMBERS = frozenset((int, float))  # not bool, which array takes for a number
_LARGEST_INT32 = 2**31 - 1
_WIDE = frozenset(("return_hidden_states", "top_logprobs_num", "token_ids_logprob", "return_routed_experts"))


class AnswerError(RuntimeError):
    """An engine gave an invalid answer; the message names the field and its value."""


@dataclass(slots=True)  # not frozen: one is made for each request, which takes three times as long then
class AnswerBounds:
    """The bounds that one request sets on its answer. None: unknown, not checked.

    num_answers      answers of the request: one for each prompt
    max_new_tokens   of each answer, at most
    log_probs        whether each token needs the log-prob with which it was sampled
    vocab_size       tokens are in [0, vocab_size)
    max_bytes        of the body, at most
    """

    num_answers: int | None = None
    max_new_tokens: int | None = None
    log_probs: bool = False
    vocab_size: int | None = None
    max_bytes: int | None = None

    @classmethod
    def by(cls, payload: Mapping[str, object], vocab_size: int | None = None) -> AnswerBounds:
        """Derive the bounds from a request in SGLang's form."""
        ids = prompt_of(payload)
        is_batch = len(ids) > 0 and isinstance(ids[0], (list, tuple, np.ndarray))
        num_answers, num_read = (len(ids), sum(map(len, ids))) if is_batch else (1, len(ids))
        new = num_new_tokens(payload)
        is_wide = not _WIDE.isdisjoint(payload) and any(payload.get(name) for name in _WIDE)
        per_token = _BYTES_PER_WIDE_TOKEN if is_wide else _BYTES_PER_TOKEN
        num_bytes = _BASE_BYTES + per_token * (num_read + num_answers * new)
        return cls(num_answers, new, bool(payload.get("return_logprob")), vocab_size, num_bytes)

    def check_size(self, num_bytes: int) -> None:
        """Refuse a body that is longer than any answer to the request can be."""
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise AnswerError(f"the body has over {self.max_bytes} bytes, more than an answer to this request can have")


def prompt_of(payload: Mapping[str, object]) -> Sequence[object] | np.ndarray:
    """The prompts of a request in SGLang's form: ids, lists of ids, a text or texts; TypeError for anything else."""
    prompt = payload.get("input_ids")
    if prompt is None:
        prompt = payload.get("text") or ""
    if not isinstance(prompt, (list, str, np.ndarray, Sequence)):  # the usual classes first: an abstract one is slow
        raise TypeError(f"input_ids or text of a request is a {type(prompt).__name__}")
    return prompt


def sampling_params(payload: Mapping[str, object]) -> Mapping[str, object]:
    """The sampling parameters of a request in SGLang's form; TypeError if they are not a mapping."""
    params = payload.get("sampling_params") or {}
    if not isinstance(params, (dict, Mapping)):
        raise TypeError(f"sampling_params of a request is a {type(params).__name__}")
    return params


def num_new_tokens(payload: Mapping[str, object]) -> int:
    """The tokens of an answer that a request in SGLang's form allows; TypeError if that is not a number."""
    limit = sampling_params(payload).get("max_new_tokens")
    if limit is None:
        return DEFAULT_NEW_TOKENS
    if not isinstance(limit, (int, float, np.integer)):
        raise TypeError(f"sampling_params.max_new_tokens is {limit!r}")
    return int(limit)


def token_ids(values: object, field: str, bounds: AnswerBounds) -> np.ndarray:
    """The ids of a field as int32 [n]: whole numbers within the vocabulary, and no more than the bound."""
    if not isinstance(values, list):
        raise AnswerError(f"{field} is {_shown(values)}, not a list of token ids")
    most = _LARGEST_INT32 if bounds.vocab_size is None else bounds.vocab_size - 1
    try:
        ids = _packed(values, "q", np.int64)
        least, largest = extremes(ids)
        if least <= 1 and _has_bool(values, ids <= 1):
            raise TypeError
    except (TypeError, struct.error):
        raise AnswerError(f"{field} holds something other than whole numbers: {_shown(values)}") from None
    if values and (least < 0 or largest > most):
        wrong = int(ids[(ids < 0) | (ids > most)][0])
        raise AnswerError(f"{field} holds {wrong}; the model's tokens are 0..{most}")
    if bounds.max_new_tokens is not None and len(ids) > bounds.max_new_tokens:
        raise AnswerError(f"{field} holds {len(ids)} tokens; the request asked for at most {bounds.max_new_tokens}")
    return ids.astype(np.int32)


def log_prob_entries(entries: object, field: str) -> tuple[np.ndarray, list[object]]:
    """Return (log-probs, float32 [n]; ids, [n]) of entries [log-prob, id, text or null]."""
    if not isinstance(entries, list):
        raise AnswerError(f"{field} is {_shown(entries)}, not a list of [log-prob, token, text]")
    try:
        values = [entry[0] for entry in entries]
        ids = [entry[1] for entry in entries]
    except (IndexError, KeyError, TypeError) as error:
        raise AnswerError(f"{field} is not a list of [log-prob, token, text]: {_shown(entries)}") from error
    return log_probs(values, field), ids


def log_probs(values: list[Any], field: str) -> np.ndarray:
    """Log-probs as float32 [n]: finite numbers, over 0 by no more than rounding."""
    try:
        exact = _packed(values, "d", np.float64)
        least, largest = extremes(exact)
        # NaN is in a sum of all, and is not found by Python's min and max.
        if not math.isfinite(sum(values)) or (largest >= 0 and _has_bool(values, exact >= 0)):
            raise TypeError
    except (TypeError, OverflowError, struct.error):
        wrong = next((value for value in values if type(value) not in _NUMBERS or not abs(value) < math.inf), values)
        raise AnswerError(f"{field} holds the log-prob {_shown(wrong)}, which is not a finite number") from None
    if largest > LARGEST_LOG_PROB or least < SMALLEST_LOG_PROB:
        bad = exact[(exact < SMALLEST_LOG_PROB) | (exact > LARGEST_LOG_PROB)][0]
        raise AnswerError(f"{field} holds the log-prob {bad}; log-probs are finite and at most 0")
    return exact.astype(np.float32)


def input_log_probs(meta: Mapping[str, object], count: int) -> np.ndarray:
    """The log-probs of the last `count` tokens of a prompt that was read, float32 [count].

    The first entry has none, as no token precedes it.
    """
    field = "meta_info.input_token_logprobs"
    entries = meta.get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) < count:
        raise AnswerError(
            f"{field} has {len(entries) if isinstance(entries, list) else 'no'} entries; {count} tokens were to be read"
        )
    return log_prob_entries(entries[len(entries) - count :], field)[0]


def routed_experts(meta: Mapping[str, object], size: tuple[int, ...], num_experts: int | None) -> np.ndarray:
    """The experts that the engine chose, of base64 of int32, as int16 of the shape `size` (tokens, layers, experts)."""
    field, data = "meta_info.routed_experts", meta.get("routed_experts")
    if not isinstance(data, str):
        raise AnswerError(f"{field} is {_shown(data)}, not base64 of int32 for {size} (tokens, layers, experts)")
    try:
        raw = pybase64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise AnswerError(f"{field} is not base64: {_shown(data)}") from error
    if len(raw) != 4 * math.prod(size):
        raise AnswerError(f"{field} has {len(raw)} bytes, not int32 for {size} (tokens, layers, experts)")
    experts = np.frombuffer(raw, np.int32)
    most = np.iinfo(np.int16).max if num_experts is None else num_experts - 1
    if experts.size and (experts.min() < -1 or experts.max() > most):
        raise AnswerError(f"{field} holds {experts.min()}..{experts.max()}; the model's experts are 0..{most}")
    return experts.reshape(size).astype(np.int16)


def extremes(values: Sequence[object] | np.ndarray) -> tuple[float, float]:
    """(least, largest) of numbers; (0, 0) of none."""
    numbers = np.asarray(values)
    return (numbers.min(), numbers.max()) if numbers.size else (0.0, 0.0)


def score(answer: object, field: str = "embedding") -> float:
    """The one finite number of what a classifier's `/classify` answers."""
    values = answer.get(field) if isinstance(answer, dict) else None
    value = values[0] if isinstance(values, list) and values else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AnswerError(f"{field}[0] is {_shown(value if values is not None else answer)}, not a finite score")
    return float(value)


def _packed(values: list[Any], code: str, dtype: type) -> np.ndarray:
    """[n] of `struct`'s type `code`, which takes nothing but numbers, true and false (struct.error), and none that are
    too large (OverflowError): numpy reads text, and makes NaN of null. It also takes half as long as numpy or `array`.
    """
    data = bytearray(len(values) * np.dtype(dtype).itemsize)
    struct.pack_into(f"={len(values)}{code}", data, 0, *values)
    return np.frombuffer(data, dtype)


def _has_bool(values: Sequence[object], places: np.ndarray) -> bool:
    """Return whether one of the values at `places` (bool [n]) is true or false, which JSON tells from 1 and 0."""
    return any(type(values[place]) is bool for place in np.flatnonzero(places).tolist())


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
