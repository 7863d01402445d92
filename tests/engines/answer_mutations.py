"""Answers that no engine should give, each a change of a good one: `MUTATIONS` has the kind of each."""

import copy
import gzip
from typing import Any

import orjson

VOCAB_SIZE, MAX_NEW_TOKENS = 512, 4
GOOD: dict[str, Any] = {
    "text": "abc",
    "output_ids": [97, 98, 99],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 99},
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
        "output_token_logprobs": [[-0.5, 97, None], [-1.25, 98, None], [0.0, 99, None]],
    },
}


def body(answer: Any) -> bytes:
    return orjson.dumps(answer)


def put(*path: str | int, value: Any) -> bytes:
    """The good answer with another value at `path`."""
    answer = copy.deepcopy(GOOD)
    at: Any = answer
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return body(answer)


def drop(*path: str) -> bytes:
    answer = copy.deepcopy(GOOD)
    del (answer if len(path) == 1 else answer[path[0]])[path[-1]]
    return body(answer)


def tokens(*ids: Any) -> bytes:
    """`ids` with their log-probs, which belong together."""
    answer = copy.deepcopy(GOOD)
    answer["output_ids"] = list(ids)
    answer["meta_info"]["output_token_logprobs"] = [[-1.0, one, None] for one in ids]
    answer["meta_info"].update(weight_versions=None, completion_tokens=len(ids))
    return body(answer)


def log_prob(value: Any) -> bytes:
    return put("meta_info", "output_token_logprobs", 1, value=[value, 98, None])


META, ENTRIES = "meta_info", "output_token_logprobs"
# (kind, what is wrong, the body)
MUTATIONS: list[tuple[str, str, bytes]] = [
    ("body", "empty", b""),
    ("body", "no JSON", b"<html>Bad gateway</html>"),
    ("body", "cut in the middle", body(GOOD)[:-20]),
    ("body", "bytes that are no UTF-8", body(GOOD).replace(b"abc", b"\xff\xfe\xfd")),
    ("body", "NaN as a number", body(GOOD).replace(b"-1.25", b"NaN")),
    ("body", "nested 100,000 deep", b"[" * 100_000 + b"]" * 100_000),
    ("body", "null", b"null"),
    ("body", "text", b'"abc"'),
    ("body", "an empty object", b"{}"),
    ("body", "8 MB of blanks before the answer", b" " * (8 << 20) + body(GOOD)),
    ("number of answers", "none", b"[]"),
    ("number of answers", "two for one request", body([GOOD, GOOD])),
    ("number of answers", "a list in a list", body([[GOOD]])),
    ("meta_info", "missing", drop(META)),
    ("meta_info", "a list", put(META, value=[])),
    ("meta_info", "prompt_tokens is negative", put(META, "prompt_tokens", value=-1)),
    ("meta_info", "cached_tokens is a fraction", put(META, "cached_tokens", value=0.5)),
    ("tokens", "null for an id", tokens(97, None)),
    ("tokens", "text for an id", tokens(97, "98")),
    ("tokens", "a fraction for an id", tokens(97, 98.5)),
    ("tokens", "true for an id", tokens(97, True)),
    ("tokens", "a list for an id", tokens(97, [98])),
    ("tokens", "one id past the vocabulary", tokens(97, VOCAB_SIZE)),
    ("tokens", "an id of 2^63", tokens(2**63)),
    ("tokens", "a negative id", tokens(97, -1)),
    ("tokens", "more tokens than were asked for", tokens(*[97] * (MAX_NEW_TOKENS + 1))),
    ("tokens", "none, and yet it stopped", tokens()),
    ("tokens", "output_ids is an object", put("output_ids", value={"0": 97})),
    ("tokens", "text is a number", put("text", value=17)),
    ("log-probs", "missing", drop(META, ENTRIES)),
    ("log-probs", "one too few", put(META, ENTRIES, value=GOOD[META][ENTRIES][:2])),
    ("log-probs", "of other tokens", put(META, ENTRIES, 1, value=[-1.25, 97, None])),
    ("log-probs", "a null log-prob", log_prob(None)),
    ("log-probs", "text for a log-prob", log_prob("-1.25")),
    ("log-probs", "true for a log-prob", log_prob(True)),
    ("log-probs", "a probability instead", log_prob(0.3)),
    ("log-probs", "-1e30", log_prob(-1e30)),
    ("log-probs", "-1e400, which JSON reads as infinite or refuses", body(GOOD).replace(b"-1.25", b"-1e400")),
    ("log-probs", "an entry without a token", put(META, ENTRIES, 1, value=[-1.25])),
    ("log-probs", "a number for an entry", put(META, ENTRIES, 1, value=-1.25)),
    ("log-probs", "an object for an entry", put(META, ENTRIES, 1, value={"logprob": -1.25})),
    ("log-probs", "an object for all entries", put(META, ENTRIES, value={"97": -0.5})),
    ("finish reason", "unknown", put(META, "finish_reason", value={"type": "tired"})),
    ("finish reason", "a number", put(META, "finish_reason", value=3)),
    ("finish reason", "a type that is a list", put(META, "finish_reason", value={"type": ["stop"]})),
    ("versions", "of fewer tokens", put(META, "weight_versions", value=[{"version": "3", "start": 0, "end": 2}])),
    ("versions", "without an end", put(META, "weight_versions", value=[{"version": "3"}])),
    ("versions", "a number for spans", put(META, "weight_versions", value=3)),
    ("versions", "a list for a version", put(META, "weight_versions", value=[{"version": [3], "end": 3}])),
]
HARMLESS: list[tuple[str, bytes]] = [
    ("one answer in a list", body([GOOD])),
    ("a field that is not known", put("novelty", value={"a": 1})),
    ("no text", drop("text")),
    ("no output_ids: those of the log-probs count", drop("output_ids")),
    ("no finish reason: it was aborted", drop(META, "finish_reason")),
    ("a log-prob that rounding made positive", log_prob(1e-7)),
    ("a whole number for a log-prob", log_prob(-1)),
    ("the last token of the vocabulary", tokens(VOCAB_SIZE - 1)),
    ("a checkpoint's name for a version", put(META, "weight_versions", value=[{"version": "step-3", "end": 3}])),
]


def compressed() -> bytes:
    """600 MB of blanks and an answer: half a megabyte on the wire."""
    return gzip.compress(b" " * (20 << 20)) * 30 + gzip.compress(body(GOOD))
