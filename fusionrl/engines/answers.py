"""Answers of engines, checked against their requests and turned into arrays; they are checked nowhere else.

Each function raises AnswerError, with the field and its value, for what it refuses. A sample of 32,000 tokens is 32,000
small lists in JSON, so they become arrays where they are read. Pure: no sockets, no processes.
"""

from __future__ import annotations

import binascii
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import pybase64

LARGEST_LOG_PROB = 1e-3  # log-softmax in bf16 rounds a certain token's log-prob to a little over 0
SMALLEST_LOG_PROB = -1e5  # below, exp of the difference to another log-prob overflows
DEFAULT_NEW_TOKENS = 128  # SGLang's own, where a request names none
_BASE_BYTES = 4 << 20
_BYTES_PER_TOKEN = 1024  # about 45 are usual: a log-prob, an id, and its text, which a user may ask for
_BYTES_PER_WIDE_TOKEN = 1 << 20  # with hidden states, or the log-probs of many tokens in each place
LONG_BYTES = 48 * 1024  # about 1,100 tokens with log-probs: from here on other processes may parse
_NUMBERS = frozenset((int, float))  # not bool, which array takes for a number
_LARGEST_INT32 = 2**31 - 1
_FINISH_REASONS = ("stop", "length", "abort")
_WIDE = frozenset(("return_hidden_states", "top_logprobs_num", "token_ids_logprob", "return_routed_experts"))


class AnswerError(RuntimeError):
    """An engine gave an invalid answer; the message names the field and its value."""


@dataclass(slots=True)  # not frozen: one is made for each request, which takes three times as long then
class AnswerBounds:
    """The bounds that one request sets on its answer. None: unknown, not checked."""

    num_answers: int | None = None  # answers of the request: one for each prompt
    max_new_tokens: int | None = None  # of each answer, at most
    log_probs: bool = False  # whether each token needs the log-prob with which it was sampled
    vocab_size: int | None = None  # tokens are in [0, vocab_size)
    max_bytes: int | None = None  # of the body, at most
    least_version: int | None = None  # of the weights that an engine has had since before the request

    @classmethod
    def by(
        cls, payload: Mapping[str, object], vocab_size: int | None = None, least_version: int | None = None
    ) -> AnswerBounds:
        """Derive the bounds from a request in SGLang's form."""
        ids = prompt_of(payload)
        is_batch = len(ids) > 0 and isinstance(ids[0], (list, tuple, np.ndarray))
        num_answers, num_read = (len(ids), sum(map(len, ids))) if is_batch else (1, len(ids))
        new = num_new_tokens(payload)
        is_wide = not _WIDE.isdisjoint(payload) and any(payload.get(name) for name in _WIDE)
        per_token = _BYTES_PER_WIDE_TOKEN if is_wide else _BYTES_PER_TOKEN
        num_bytes = _BASE_BYTES + per_token * (num_read + num_answers * new)
        return cls(num_answers, new, bool(payload.get("return_logprob")), vocab_size, num_bytes, least_version)

    def check_size(self, num_bytes: int) -> None:
        """Refuse a body that is longer than any answer to the request can be."""
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise AnswerError(f"the body has over {self.max_bytes} bytes, more than an answer to this request can have")


UNBOUNDED = AnswerBounds()


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


def parse_score(answer: object, field: str = "embedding") -> float:
    """The one finite number of what a classifier's `/classify` answers."""
    values = answer.get(field) if isinstance(answer, dict) else None
    value = values[0] if isinstance(values, list) and values else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AnswerError(f"{field}[0] is {_shown(value if values is not None else answer)}, not a finite score")
    return float(value)


def _packed(values: Sequence[object], code: str, dtype: type) -> np.ndarray:
    """[n] of `struct`'s type `code`, which takes nothing but numbers, true and false (struct.error), and none that are
    too large (OverflowError): numpy reads text, and makes NaN of null. It also takes half as long as numpy or `array`.
    """
    data = bytearray(len(values) * np.dtype(dtype).itemsize)
    struct.pack_into(f"={len(values)}{code}", data, 0, *values)
    return np.frombuffer(data, dtype)


def _has_bool(values: Sequence[object], places: np.ndarray) -> bool:
    """Return whether one of the values at `places` (bool [n]) is true or false, which JSON tells from 1 and 0."""
    return bool in map(type, map(values.__getitem__, np.flatnonzero(places).tolist()))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass
class Generation:
    """One generated continuation of `n` tokens."""

    tokens: np.ndarray  # int32 [n]
    log_probs: np.ndarray  # float32 [n], under the engine's distribution; [0] if they were not asked for
    text: str
    finish_reason: str  # "stop", "length" or "abort"
    weight_versions: list[tuple[int | str, int]]  # (version, number of tokens) in order; the numbers sum to n
    prompt_tokens: int
    cached_tokens: int
    meta_info: dict[str, Any]  # the engine's own, without the log-probs
    part: int = 1  # number of the request that made its end: over 1 if an engine died and another continued


def parse_answer(body: bytes, bounds: AnswerBounds = UNBOUNDED) -> list[Generation]:
    """The generations of the body of an answer: one, or one for each prompt of the request; AnswerError if wrong."""
    bounds.check_size(len(body))
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise AnswerError(f"the body is not JSON ({error}): {body[:80]!r}") from error
    answers = answer if isinstance(answer, list) else [answer]
    if bounds.num_answers is not None and len(answers) != bounds.num_answers:
        raise AnswerError(f"the body has {len(answers)} answers to a request for {bounds.num_answers}")
    return [parse_generation(item, bounds) for item in answers]


def parse_generation(answer: object, bounds: AnswerBounds = UNBOUNDED, first: int = 0) -> Generation:
    """Turn the JSON of one `/generate` answer into a `Generation`.

    first  number of its first token in the request's answer, of which `weight_versions` are spans

    Raises AnswerError if a field is missing, of another type, or out of its range (`AnswerBounds`); or fields do not
    belong together.
    """
    if not isinstance(answer, dict) or not isinstance(meta := answer.get("meta_info"), dict):
        raise AnswerError("meta_info is missing")
    # Entries are [log-prob, token, text or null].
    entries, field = meta.pop("output_token_logprobs", None) or [], "meta_info.output_token_logprobs"
    values, sampled = log_prob_entries(entries, field)
    ids = answer.get("output_ids")
    if ids is None:
        ids = sampled
    tokens = token_ids(ids, "output_ids", bounds)
    if entries and sampled != ids:
        raise AnswerError(f"{field} has {len(entries)} log-probs of other tokens than the {len(ids)} of output_ids")
    finish = _finish_reason(meta)
    if bounds.log_probs and len(tokens) and not entries:
        raise AnswerError(f"{field} is missing; the request asked for log-probs")
    if bounds.max_new_tokens and not len(tokens) and finish not in ("", "abort"):
        raise AnswerError(f"output_ids holds no token, with the finish reason {finish}")
    versions = _version_spans(meta, len(ids), first)
    oldest, least = versions[0][0] if versions else 0, bounds.least_version
    if least and versions and (isinstance(oldest, str) or oldest < least):
        raise AnswerError(
            f"meta_info.weight_version is {oldest!r}, and version {least} was pushed before the request was sent:"
            " was the engine started again, or given weights, from outside of this run?"
        )
    return Generation(
        tokens=tokens,
        log_probs=values,
        text=_text(answer),
        finish_reason=finish or "abort",
        weight_versions=versions,
        prompt_tokens=_count(meta, "prompt_tokens"),
        cached_tokens=_count(meta, "cached_tokens"),
        meta_info=meta,
    )


def _finish_reason(meta: Mapping[str, object]) -> str:
    """ "stop", "length" or "abort"; "" if the answer continues; AnswerError for anything else."""
    reason = meta.get("finish_reason")
    if reason is None:
        return ""
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in _FINISH_REASONS:
        raise AnswerError(f"meta_info.finish_reason is {reason!r}; known are {', '.join(_FINISH_REASONS)}")
    return str(kind)


def _text(answer: Mapping[str, object]) -> str:
    text = answer.get("text")
    if text is None:
        return ""
    if not isinstance(text, str):
        raise AnswerError(f"text is a {type(text).__name__}")
    return text


def _count(meta: Mapping[str, object], name: str) -> int:
    value = meta.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise AnswerError(f"meta_info.{name} is {value!r}, not a number of tokens")
    return value


def _version_spans(meta: Mapping[str, object], num_tokens: int, first: int = 0) -> list[tuple[int | str, int]]:
    """`weight_versions` from token `first` on where the server has it, else one span of `weight_version`."""
    spans = meta.get("weight_versions")
    if num_tokens == 0:
        return []
    if not spans:
        return [(_as_version(meta.get("weight_version", "default")), num_tokens)]
    version_counts = []
    covered = 0
    try:
        for span in spans:  # type: ignore[attr-defined]
            end = min(int(span["end"]) - first, num_tokens)
            if end > covered:
                version_counts.append((_as_version(span["version"]), end - covered))
                covered = end
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"meta_info.weight_versions is {spans!r:.200}, not spans of version and end") from error
    if covered != num_tokens:
        raise AnswerError(f"meta_info.weight_versions {spans!r:.200} do not cover {num_tokens} tokens")
    return version_counts


def _as_version(version: object) -> int | str:
    if isinstance(version, bool) or not isinstance(version, (int, str)):
        raise AnswerError(f"meta_info.weight_version is {version!r:.80}, neither text nor a number")
    text = str(version)
    # Pushes count versions from 0; a longer number is a name.
    return int(text) if text.isdecimal() and len(text) < 10 else text


class StreamParser:
    """Turns the events of one streamed answer into `Generation`s that follow one another without overlap.

    Servers send either what is new in each event (`incremental_streaming_output`) or all so far: `completion_tokens`,
    the number so far, says what is new in both. A request that is aborted while it waits to resume ends with an event
    that repeats earlier ones.
    """

    def __init__(self, bounds: AnswerBounds = UNBOUNDED) -> None:
        self._bounds = bounds
        self._num_tokens = 0
        self._text = ""

    def parse(self, event: Mapping[str, object]) -> Generation:
        """The tokens that are new in `event`; the finish reason is "" in all but the last one.

        The versions are those that the event tells (`server_patches.stamp_streams`), else the current one. Raises
        AnswerError if tokens are missing, or a field is wrong (`parse_generation`).
        """
        meta = event.get("meta_info") if isinstance(event, dict) else None
        if not isinstance(meta, dict) or "completion_tokens" not in meta:
            raise AnswerError("meta_info.completion_tokens is missing in an event of a stream")
        total, ids = _count(meta, "completion_tokens"), event.get("output_ids") or []
        num_new = total - self._num_tokens
        if not isinstance(ids, list) or not 0 <= num_new <= len(ids):
            raise AnswerError(f"output_ids: the stream brought {ids!r:.80} where {num_new} of {total} tokens were due")
        most = self._bounds.max_new_tokens
        if most is not None and total > most:
            raise AnswerError(f"the stream brought {total} tokens; the request asked for at most {most}")
        text = _text(event)
        if len(ids) != num_new:  # all so far, or the repetition
            text = text[len(self._text) :] if len(ids) == total else ""
        entries = meta.get("output_token_logprobs") or []
        if isinstance(entries, list):
            entries = entries[len(entries) - num_new :]
        new_meta = {**meta, "output_token_logprobs": entries}
        answer = {"output_ids": ids[len(ids) - num_new :], "text": text, "meta_info": new_meta}
        # Events without a token are usual: the last one may bring the finish reason alone.
        bounds = replace(self._bounds, max_new_tokens=None) if total else self._bounds
        piece = parse_generation(answer, bounds, self._num_tokens)
        self._num_tokens, self._text = total, self._text + text
        return replace(piece, finish_reason=_finish_reason(meta))


def join(pieces: Sequence[Generation]) -> Generation:
    """One answer of the pieces of a stream; its versions are the exact ones of the last event, where that has them."""
    last = pieces[-1]
    last_pieces = [piece for piece in pieces if piece.part == last.part]  # of whose request the last event speaks
    num_own = sum(len(piece.tokens) for piece in last_pieces)
    earlier = pieces[: len(pieces) - len(last_pieces)]
    spans = last_pieces if not last.meta_info.get("weight_versions") else []
    versions = [span for piece in [*earlier, *spans] for span in piece.weight_versions]
    if not spans:
        versions += _version_spans(last.meta_info, num_own)
    return replace(
        last,
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        log_probs=np.concatenate([piece.log_probs for piece in pieces]),
        text="".join(piece.text for piece in pieces),
        weight_versions=versions,
        prompt_tokens=pieces[0].prompt_tokens,
        cached_tokens=pieces[0].cached_tokens,
    )


def checked_event(url: str, event: object) -> Mapping[str, object]:
    """The event of a stream; EndpointError if the engine refuses or gives up the request after a status of 200."""
    if not isinstance(event, dict):
        raise AnswerError(f"an event of the stream is not a JSON object: {str(event)[:80]}")
    error = event.get("error")
    if error is not None:
        code, text = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
        raise _refusal(url, code, str(text))
    meta = event.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code") is not None:
        raise _refusal(url, reason["status_code"], str(reason.get("message")))
    return event


def _refusal(url: str, code: object, text: str) -> RuntimeError:
    from fusionrl.engines.http import EndpointError  # imports requests, which parsers' processes need not

    return EndpointError(url, code if isinstance(code, int) and 400 <= code < 600 else 500, text)


def as_object(answer: object, name: str) -> dict[str, object]:
    """`answer` as the JSON object that it should be; else AnswerError."""
    if not isinstance(answer, dict):
        raise AnswerError(f"{name} is not a JSON object: {str(answer)[:200]}")
    return answer


def as_list(answer: object, name: str) -> list[object]:
    """`answer` as the JSON list that it should be; else AnswerError."""
    if not isinstance(answer, list):
        raise AnswerError(f"{name} is not a JSON list: {str(answer)[:200]}")
    return answer
