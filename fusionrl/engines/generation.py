"""What an engine answered to `/generate`, as arrays.

The answer is turned into arrays where it is read: a sample of 32,000 tokens is 32,000 small lists in JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
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
