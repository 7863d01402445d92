"""Weight versions of tokens that a user's function sampled by `fusionrl.plugin_api.post`.

The engines say in each answer which version of the weights sampled it (`meta_info`). Functions written for slime set
`sample.tokens` and `sample.rollout_log_probs` by hand and know nothing of versions of tokens. So the answers are noted
while such a function runs, and its samples get their versions from them. A trained token that is in none of the answers
was sampled by no engine: a function has put a tool's text into the response, and has set no `loss_mask`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from fusionrl.base.wording import BASE
from fusionrl.data.sample import Sample, response_mask
from fusionrl.data.sample_fields import (
    UNKNOWN_VERSION,
    as_version,
    changes_of,
    note_changes,
    note_temperature,
    scored_at,
    split_versions,
    token_versions,
)

_lock = threading.Lock()
_warned: set[str] = set()
_warnings: list[str] = []
_FEW = 2  # tokens that a function may add by hand: an end of the text, a line's end
_ATTRIBUTE = "num_unsampled"


@dataclass
class EngineAnswers:
    """Answers of the policy's engines to the requests of one function.

    parts         (tokens, their versions, temperature), int32 [n] each, in the order of the answers; empty where
                  `keeps_tokens` is off
    versions      all versions that were among them
    temperatures  of the requests
    changes       their sampling parameters that change the policy's distribution
    barred        sampled tokens that no engine may get back, int32 [n] each
    adapter       that answers, where the request names none; None: the only one, or the model
    """

    urls: tuple[str, ...]
    keeps_tokens: bool = True
    parts: list[tuple[np.ndarray, np.ndarray, float]] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    temperatures: set[float] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)
    barred: list[np.ndarray] = field(default_factory=list)
    adapter: str | None = None

    def add(self, answer: dict[str, object], params: Mapping[str, object]) -> None:
        """Note one answer of /generate to a request with these sampling parameters; any other is passed over."""
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            return
        tokens = answered_tokens(answer)
        versions = token_versions(meta, len(tokens))
        self.versions |= set(versions.tolist())
        temperature = scored_at(params.get("temperature"))
        self.temperatures.add(temperature)
        self.changes |= set(changes_of(params))
        if self.keeps_tokens:
            self.parts.append((tokens, versions, temperature))


def answered_tokens(answer: Mapping[str, object]) -> np.ndarray:
    """Return the sampled tokens of one answer of /generate, int32 [n]."""
    meta = answer.get("meta_info")
    entries = (meta.get("output_token_logprobs") if isinstance(meta, dict) else None) or []
    return np.array(answer.get("output_ids") or [entry[1] for entry in entries], np.int32)


_answers: ContextVar[EngineAnswers | None] = ContextVar("answers", default=None)


@contextmanager
def noting_answers(urls: Sequence[str], keeps_tokens: bool = True) -> Iterator[EngineAnswers]:
    """Note what the engines answer to `post` within the block, also in tasks and threads that are started in it.

    urls          of the policy's engines and their router
    keeps_tokens  to tell the versions of several pushes apart; else only which versions there were
    """
    answers = EngineAnswers(tuple(f"{url}/" for url in urls if url), keeps_tokens)
    token = _answers.set(answers)
    try:
        yield answers
    finally:
        _answers.reset(token)


def answers_of(url: str) -> EngineAnswers | None:
    """Return what is noted of this address; None: it is none of the policy's, or no function of a user's is running."""
    answers = _answers.get()
    return answers if answers is not None and f"{url}/".startswith(answers.urls or ("\0",)) else None


def note_answer(url: str, answer: object, payload: Mapping[str, object]) -> None:
    """Note what `url` answered to `payload`, if it is one of the policy's engines or their router.

    Not what another adapter answered, or the weights without one, to a function that asks it as a judge.
    """
    answers, adapter = answers_of(url), payload.get("lora_path")
    if answers is not None and adapter != BASE and (None in (adapter, answers.adapter) or adapter == answers.adapter):
        several = answer if isinstance(answer, list) else [answer]
        params = payload.get("sampling_params")
        each = params if isinstance(params, list) and len(params) == len(several) else [params] * len(several)
        for sample, versions in zip(several, each, strict=True):
            if isinstance(sample, dict):
                answers.add(sample, versions if isinstance(versions, Mapping) else {})


@dataclass
class OriginalResponse:
    """A sample's response before a user's function had it."""

    response: np.ndarray
    versions: np.ndarray | None

    @classmethod
    def of(cls, sample: Sample) -> OriginalResponse:
        """Keep what `fill_versions` compares the result with."""
        response, versions = _response(sample), split_versions(vars(sample)["weight_versions"])[0]
        return cls(response, np.array(versions, np.int32) if len(versions) else None)

    def num_kept(self, sample: Sample) -> int:
        """Return how many tokens at the start of its response are unchanged in the sample."""
        return common_prefix(_response(sample), self.response)


def fill_versions(
    samples: Sequence[Sample], answers: EngineAnswers, where: str, before: OriginalResponse | None = None
) -> None:
    """Give each sample the versions that its function has not set, from the engines' answers.

    Texts that the function appended, one for each turn as in slime, fill in versions that the answers leave open, but
    never those of an earlier rollout's tokens. Tokens that no engine sampled get the version of the token
    before. Trained tokens of an unknown version get -1, or `weight_versions` is None if none is known; one warning for
    each function `where`.
    """
    for sample in samples:
        try:
            known = _known(sample, before)
            num_kept = 0 if before is None or known is None else before.num_kept(sample)
        except (TypeError, ValueError):  # fields of other types, a version that is not a number
            known = None
        if known is None or not len(known):
            continue  # what does not fit is for `check_samples` to say
        if (known == UNKNOWN_VERSION).any():
            _find(_response(sample)[num_kept:], known[num_kept:], answers)
            _tell_turns(sample, known, num_kept)
            _spread(sample, known)
        is_known = known != UNKNOWN_VERSION
        sample.weight_versions = known if is_known.any() else None
        _note_temperatures(sample, answers, num_kept, where)
        if answers.changes:
            note_changes(sample, answers.changes)
        if (~is_known & (response_mask(sample) > 0)).any():
            warn_once(
                where,
                f"{where}: the weight versions of its tokens are not known (weight_versions is -1 or null): ask the"
                " engines by fusionrl.plugin_api.post or generate_turn, or hand what they answer to"
                ' sample.append_response_tokens(…, meta_info=output["meta_info"]) (docs/guides/agents.md)',
            )


def take_warnings() -> list[str]:
    """Warnings since the last call."""
    with _lock:
        collected = list(_warnings)
        _warnings.clear()
    return collected


def _known(sample: Sample, before: OriginalResponse | None) -> np.ndarray | None:
    """[response_length] int32: the versions that the sample has, -1 elsewhere; None where its fields do not fit."""
    attributes = vars(sample)
    count, versions, mask = int(sample.response_length), attributes["weight_versions"], attributes["loss_mask"]
    if count > sample.num_tokens or (mask is not None and len(mask) != count):
        return None
    known = np.full(count, UNKNOWN_VERSION, np.int32)
    if versions is None or not len(versions):
        return known
    earlier = None if before is None else before.versions
    num_same = 0 if before is None else before.num_kept(sample)
    texts = split_versions(versions)[1]
    if len(texts) != len(versions):
        versions = versions[: len(versions) - len(texts)]  # those of tokens; `_tell_turns` reads the texts
    elif len(versions) != count or num_same:
        versions = earlier  # a text for each turn: where an earlier rollout's response continues, of the turns since
        if versions is None:
            return known
    is_array = isinstance(versions, np.ndarray) and versions.dtype.kind == "i"
    numbers = np.asarray(versions if is_array else [as_version(version) for version in versions], np.int32)
    if earlier is not None and np.array_equal(numbers, earlier):
        known[:num_same] = numbers[:num_same]  # as they came: not right for tokens that were sampled anew
        return known
    if len(numbers) != count and (mask is None or len(numbers) > count):
        return None
    known[: len(numbers)] = numbers  # tokens that the function appended by hand, with their masks, are not known
    return known


def _tell_turns(sample: Sample, known: np.ndarray, num_kept: int) -> None:
    """Fill in the versions of turns' texts for the trained tokens after the first `num_kept`.

    All of them where the texts agree; else where there is a text for each stretch of tokens that are trained on.
    """
    versions = [as_version(text) for text in split_versions(vars(sample)["weight_versions"])[1]]
    new = known[num_kept:]
    if not versions or len(versions) == len(known):
        return
    loss_mask = sample.array("loss_mask")
    trained = np.ones(len(new), bool) if loss_mask is None else np.asarray(loss_mask)[num_kept:] > 0
    fits = trained & (new == UNKNOWN_VERSION)
    if len(set(versions)) == 1:
        new[fits] = versions[0]
        return
    begins = trained & ~np.concatenate([[False], trained[:-1]])
    if int(begins.sum()) == len(versions):
        turn = np.cumsum(begins) - 1
        new[fits] = np.asarray(versions, np.int32)[turn[fits]]


def _find(response: np.ndarray, known: np.ndarray, answers: EngineAnswers) -> None:
    """Fill in the answers' versions: for all tokens if there is one, else where the answers' tokens are found."""
    if len(answers.versions) == 1:
        known[known == UNKNOWN_VERSION] = next(iter(answers.versions))
        return
    for place, versions, _ in _found(response, answers):
        part = known[place : place + len(versions)]
        part[part == UNKNOWN_VERSION] = versions[part == UNKNOWN_VERSION]


def _note_temperatures(sample: Sample, answers: EngineAnswers, num_kept: int, where: str) -> None:
    """Note the temperatures that the function asked for, unless it has set them itself; warn if none is found."""
    if not answers.temperatures or (sample.temperature is not None and not num_kept):
        return
    if len(answers.temperatures) == 1:
        note_temperature(sample, num_kept, next(iter(answers.temperatures)))
        return
    for place, _, temperature in _found(_response(sample), answers, num_kept):
        note_temperature(sample, place, temperature)
    if sample.temperature is None:
        warn_once(
            f"{where}: temperature",
            f"{where}: it asked the engines at several temperatures, and which of them its tokens have is not known:"
            " trainers score them at --rollout-temperature; set sample.temperature (docs/guides/agents.md)",
        )


def _found(response: np.ndarray, answers: EngineAnswers, start: int = 0) -> Iterator[tuple[int, np.ndarray, float]]:
    """Yield (place, versions, temperature) of the answers that are in the response, each behind the one before."""
    for tokens, versions, temperature in answers.parts:
        place = next(places_of(tokens, response, start), None) if len(tokens) else None
        if place is not None:
            yield place, versions, temperature
            start = place + len(tokens)


def places_of(tokens: np.ndarray, response: np.ndarray, start: int = 0) -> Iterator[int]:
    """Yield the places of `tokens` in `response`, both int32, from `start` on."""
    text, part, size = response.tobytes(), tokens.tobytes(), response.itemsize
    place = text.find(part, start * size)
    while place >= 0:
        if place % size == 0:  # else within a number
            yield place // size
        place = text.find(part, place + 1)


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return the number of tokens with which both begin."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size


def _spread(sample: Sample, known: np.ndarray) -> None:
    """Tokens that no engine sampled: the version of the token before, at the start that of the first one known."""
    known_places = np.flatnonzero(known != UNKNOWN_VERSION)
    if not len(known_places):
        return
    loss_mask = sample.array("loss_mask")
    mask = np.ones(len(known)) if loss_mask is None else loss_mask
    untrained = (known == UNKNOWN_VERSION) & (mask == 0)
    last = np.maximum.accumulate(np.where(known != UNKNOWN_VERSION, np.arange(len(known)), -1))
    known[untrained] = known[np.where(last < 0, known_places[0], last)][untrained]


def _response(sample: Sample) -> np.ndarray:
    tokens = np.asarray(sample.array("tokens"), np.int32)
    return tokens[len(tokens) - sample.response_length :]


def warn_once(key: str, text: str) -> None:
    """Keep a warning for `take_warnings`, the first time that `key` comes."""
    with _lock:
        if key not in _warned:
            _warned.add(key)
            _warnings.append(text)


# ------------------------------------------------------------------------------------------------ tokens of no engine
def num_unsampled(sample: Sample) -> int:
    """Return how many trained tokens are surely no engine's; --mode reject-sampling accepts no such sample."""
    return int(vars(sample).get(_ATTRIBUTE, 0))


def warn_of_unsampled(samples: Sequence[Sample], answers: EngineAnswers, where: str, before: OriginalResponse) -> None:
    """Warn, once for each function `where`, of trained tokens that are in none of the engines' answers.

    Only of samples in which at least one whole answer stands: others were made of something else than these answers (by
    another client, or the answers were a judge's), or were tokenized anew.

    samples  as the function left them
    answers  to its requests by `fusionrl.plugin_api.post`; without any, nothing is known
    where    flag and path of the function
    before   the sample's response before the function had it: an earlier rollout's tokens were sampled
    """
    for sample in samples:
        vars(sample).pop(_ATTRIBUTE, None)
    parts = [tokens for tokens, _, _ in answers.parts]
    if not parts or not all(len(tokens) for tokens in parts):
        return
    for sample in samples:
        try:
            response, trained = _response(sample), response_mask(sample) > 0
        except (TypeError, ValueError, OverflowError):
            continue  # fields that do not fit are for `check_samples` to name
        if len(trained) != len(response) or _names_versions(sample):
            continue
        sampled, has_whole = found_in(response, parts)
        size = len(before.response)
        if np.array_equal(response[:size], before.response):
            sampled[:size] = True
        missing = int((trained & ~sampled).sum())
        if not missing or not has_whole:
            continue
        if missing > _FEW:
            vars(sample)[_ATTRIBUTE] = missing
        warn_once(
            f"unsampled {where}",
            f"{where}: {missing} of the {int(trained.sum())} tokens that sample {sample.index} is trained on are in"
            " no answer of the engines: give them 0 in sample.loss_mask, or append them by append_text; or, if a"
            " tokenizer made them anew of the answer's text, take the tokens of the answer (docs/guides/agents.md)",
        )


def _names_versions(sample: Sample) -> bool:
    """Return whether the function has named the version of each token, and so knows what was sampled."""
    versions = vars(sample)["weight_versions"]
    if versions is None or len(versions) != sample.response_length or not len(versions):
        return False
    return all(isinstance(version, (int, np.integer)) and version != UNKNOWN_VERSION for version in versions)


def found_in(response: np.ndarray, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, bool]:
    """Return which tokens of `response` [n] belong to one of `parts`, [n] bool, and whether it holds a whole part.

    Wherever a part stands as a whole, it counts. A stretch that is left may begin with a part that was cut.
    """
    is_covered = np.zeros(len(response), bool)
    for part in parts:
        for place in places_of(part, response):
            is_covered[place : place + len(part)] = True
    has_whole = bool(is_covered.any())
    for start in [i for i in np.flatnonzero(~is_covered) if i == 0 or is_covered[i - 1]]:
        cut = max((common_prefix(response[start:], part) for part in parts), default=0)
        is_covered[start : start + cut] = True
    return is_covered, has_whole
