"""Turn answers of `/generate`, whole or streamed, into arrays.

A sample of 32,000 tokens is 32,000 small lists in JSON, so they become arrays where they are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from fusionrl.engines.answer_checks import AnswerBounds, AnswerError, log_prob_entries, token_ids

_UNBOUNDED = AnswerBounds()
FINISH_REASONS = ("stop", "length", "abort")


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


def parse_answer(body: bytes, bounds: AnswerBounds = _UNBOUNDED) -> list[Generation]:
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


def parse_generation(answer: object, bounds: AnswerBounds = _UNBOUNDED, first: int = 0) -> Generation:
    """Turn the JSON of one `/generate` answer into a `Generation`. The one place where answers are checked.

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
    finish = finish_reason(meta)
    if bounds.log_probs and len(tokens) and not entries:
        raise AnswerError(f"{field} is missing; the request asked for log-probs")
    if bounds.max_new_tokens and not len(tokens) and finish not in ("", "abort"):
        raise AnswerError(f"output_ids holds no token, with the finish reason {finish}")
    return Generation(
        tokens=tokens,
        log_probs=values,
        text=_text(answer),
        finish_reason=finish or "abort",
        weight_versions=_version_spans(meta, len(ids), first),
        prompt_tokens=_count(meta, "prompt_tokens"),
        cached_tokens=_count(meta, "cached_tokens"),
        meta_info=meta,
    )


def finish_reason(meta: Mapping[str, object]) -> str:
    """ "stop", "length" or "abort"; "" if the answer continues; AnswerError for anything else."""
    reason = meta.get("finish_reason")
    if reason is None:
        return ""
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in FINISH_REASONS:
        raise AnswerError(f"meta_info.finish_reason is {reason!r}; known are {', '.join(FINISH_REASONS)}")
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

    def __init__(self, bounds: AnswerBounds = _UNBOUNDED) -> None:
        self._bounds = bounds
        self._num_tokens = 0
        self._text = ""

    def parse(self, event: Mapping[str, object]) -> Generation:
        """The tokens that are new in `event`; the finish reason is "" in all but the last one.

        The versions are those that the event tells (`engines.stream_versions`), else the current one. Raises
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
        return replace(piece, finish_reason=finish_reason(meta))


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
