"""What `/generate` answers, whole or as a stream, as arrays.

A sample of 32,000 tokens is 32,000 small lists in JSON, so they become arrays where they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson


@dataclass
class Generation:
    """One generated continuation of `n` tokens."""

    tokens: np.ndarray
    """int32 [n]."""
    log_probs: np.ndarray
    """float32 [n], of the sampled tokens under the engine's distribution; [0] if they were not asked for."""
    text: str
    finish_reason: str
    """ "stop", "length" or "abort"."""
    weight_versions: list[tuple[int | str, int]]
    """(version, number of tokens) in order; the numbers sum to n."""
    prompt_tokens: int
    cached_tokens: int
    meta_info: dict[str, Any]
    """The engine's own, without the log-probs."""
    part: int = 1
    """Which request made the end of it: over 1 where an engine died, and another one went on."""


def parse_answer(body: bytes) -> list[Generation]:
    """The generations of the body of an answer: one, or one for each prompt of the request.

    Raises RuntimeError as `parse_generation` does, ValueError for what is no JSON.
    """
    answer = orjson.loads(body)
    return [parse_generation(one) for one in (answer if isinstance(answer, list) else [answer])]


def parse_generation(answer: dict[str, Any]) -> Generation:
    """Turn the JSON of one `/generate` answer into a `Generation`.

    Raises RuntimeError when tokens and log-probs do not belong together.
    """
    meta = answer["meta_info"]
    # Entries are [log-prob, token, text or null].
    entries = meta.pop("output_token_logprobs", None) or []
    ids = answer.get("output_ids")
    if ids is None:
        ids = [entry[1] for entry in entries]
    if entries and [entry[1] for entry in entries] != ids:
        raise RuntimeError(
            f"request {meta.get('id')}: the engine returned {len(ids)} tokens and {len(entries)} log-probs of others"
        )
    return Generation(
        tokens=np.array(ids, dtype=np.int32),
        log_probs=np.fromiter((entry[0] for entry in entries), dtype=np.float32, count=len(entries)),
        text=answer.get("text") or "",
        finish_reason=(meta.get("finish_reason") or {}).get("type", "abort"),
        weight_versions=_version_spans(meta, len(ids)),
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        cached_tokens=int(meta.get("cached_tokens", 0)),
        meta_info=meta,
    )


def _version_spans(meta: dict[str, Any], num_tokens: int) -> list[tuple[int | str, int]]:
    """`weight_versions` where the server has it, else one span of `weight_version`."""
    if num_tokens == 0:
        return []
    spans = meta.get("weight_versions")
    if not spans:
        return [(_as_version(meta.get("weight_version", "default")), num_tokens)]
    found = []
    covered = 0
    for span in spans:
        end = min(int(span["end"]), num_tokens)
        if end > covered:
            found.append((_as_version(span["version"]), end - covered))
            covered = end
    if covered != num_tokens:
        raise RuntimeError(f"request {meta.get('id')}: weight_versions {spans} do not cover {num_tokens} tokens")
    return found


def _as_version(version: Any) -> int | str:
    text = str(version)
    return int(text) if text.isdecimal() else text


class StreamParser:
    """Turns the events of one streamed answer into `Generation`s that follow one another without overlap.

    Servers send either what is new in each event (`incremental_streaming_output`) or all so far: `completion_tokens`,
    the number so far, says what is new in both. A request that is aborted while it waits to go on ends with an event
    that repeats what was sent.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._text = ""

    def parse(self, event: dict[str, Any]) -> Generation:
        """The tokens that are new in `event`; the finish reason is "" in all but the last one.

        The versions are those of the moment; `join` takes the exact ones of the last event.
        Raises RuntimeError when tokens are missing.
        """
        meta = event["meta_info"]
        total, ids = int(meta["completion_tokens"]), event.get("output_ids") or []
        num_new = total - self._num_tokens
        if not 0 <= num_new <= len(ids):
            raise RuntimeError(
                f"request {meta.get('id')}: the stream brought {len(ids)} tokens where {num_new} of {total} were due"
            )
        text = event.get("text") or ""
        if len(ids) != num_new:  # all so far, or the repetition
            text = text[len(self._text) :] if len(ids) == total else ""
        entries = meta.get("output_token_logprobs") or []
        finish = (meta.get("finish_reason") or {}).get("type", "")
        spans = meta.get("weight_versions")
        own = {
            **meta,
            "output_token_logprobs": entries[len(entries) - num_new :] if entries else [],
            "weight_versions": spans and [{**span, "end": int(span["end"]) - self._num_tokens} for span in spans],
        }
        piece = parse_generation({"output_ids": ids[len(ids) - num_new :], "text": text, "meta_info": own})
        self._num_tokens, self._text = total, self._text + text
        return replace(piece, finish_reason=finish, meta_info=own | {"weight_versions": spans})


def join(pieces: Sequence[Generation]) -> Generation:
    """One answer of the pieces of a stream; its versions are the exact ones of the last event, where that has them."""
    last = pieces[-1]
    own = [piece for piece in pieces if piece.part == last.part]  # the last event speaks of the last request alone
    num_own = sum(len(piece.tokens) for piece in own)
    earlier = pieces[: len(pieces) - len(own)]
    spans = own if not last.meta_info.get("weight_versions") else []
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
