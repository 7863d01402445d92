"""`post` of a user's function: what the policy's engines answer is noted for the weight versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import image_size
from fusionrl.engines.http import post as _post
from fusionrl.engines.images import MediaTokens, check_images, image_groups
from fusionrl.rollout.image_requests import check_expanded, media_tokens
from fusionrl.rollout.request_seeds import seeds_in_context
from fusionrl.rollout.turn_versions import forbid_replay
from fusionrl.rollout.weight_versions import EngineAnswers, answered_tokens, answers_of, note_answer, places_of

_BEFORE = 2  # tokens before an answer, without which a placeholder at its start could be a prompt's


@dataclass(frozen=True)
class FunctionRequest:
    """A request to /generate with `input_ids`.

    payload      as engines take it, of the prompts that they may get; None: of none
    prompts      as the function has given them
    num_tokens   of each prompt, with all tokens of its images; None: it has none, or their sizes are not known
    is_sent      of each prompt; the others hold a placeholder that the model has sampled
    num_answers  to each prompt
    is_batch     it has a list of prompts
    media        ids of the model's media
    """

    payload: Mapping[str, object] | None
    prompts: list[list[int]]
    num_tokens: list[int | None]
    is_sent: list[bool]
    num_answers: int
    is_batch: bool
    media: MediaTokens

    @classmethod
    def of(cls, payload: Mapping[str, object], barred: Sequence[np.ndarray]) -> FunctionRequest | None:
        """Return a function's request; None: it has no ids, or the model does not see.

        Functions for slime send ids in which each image has all its placeholders.

        barred  tokens that no engine may get back, as `read` notes them

        Raises:
            ValueError: an image cannot be read, or the ids have not one placeholder, or all, of each image.
        """
        media, ids = media_tokens(), payload.get("input_ids")
        if media is None or not isinstance(ids, list) or not ids:
            return None
        is_batch = isinstance(ids[0], list)
        prompts = ids if is_batch else [ids]
        groups = image_groups(payload.get("image_data") or None, len(prompts), is_batch)
        is_sent = [not any(_holds(prompt, part) for part in barred) for prompt in prompts]
        taken = [
            _as_engines_take(prompt, images, media) if sends else (prompt, None)
            for prompt, images, sends in zip(prompts, groups, is_sent, strict=True)
        ]
        request: dict[str, object] | None = None
        if any(is_sent):
            request = {name: _chosen(value, is_sent) if is_batch else value for name, value in payload.items()}
            values = {"input_ids": [tokens for tokens, _ in taken], "image_data": groups if any(groups) else None}
            for name, value in values.items():
                request[name] = value and (_chosen(value, is_sent) if is_batch else value[0])
            if request["image_data"] is None:
                del request["image_data"]
            check_images(request, media)
        params = payload.get("sampling_params")
        params = params[0] if isinstance(params, list) and params else params
        num_answers = params.get("n") if isinstance(params, Mapping) else None
        num_answers = num_answers if isinstance(num_answers, int) else 1
        return cls(request, prompts, [number for _, number in taken], is_sent, num_answers, is_batch, media)

    def read(self, answer: object, answers: EngineAnswers) -> None:
        """Check what the engines have answered, and note the tokens that no engine may get back.

        Raises:
            AnswerError: an engine has read another number of tokens.
        """
        sent = [item for item in zip(self.prompts, self.num_tokens, self.is_sent, strict=True) if item[2]]
        asked = [(prompt, number) for prompt, number, _ in sent for _ in range(self.num_answers)]
        for one, (prompt, number) in zip(answer if isinstance(answer, list) else [answer], asked, strict=False):
            meta = one.get("meta_info") if isinstance(one, dict) else None
            if not isinstance(meta, dict):
                continue
            reason = meta.get("finish_reason")
            if number is not None and not (isinstance(reason, dict) and reason.get("type") == "abort"):
                check_expanded(meta.get("prompt_tokens"), number, "the request")
            tokens = answered_tokens(one)
            if self.media.bar(tokens):
                places = np.flatnonzero(np.isin(tokens, self.media.known))
                end = places[0] + 1 if len(places) else len(tokens)
                answers.barred.append(np.concatenate([np.array(prompt[-_BEFORE:], np.int32), tokens[:end]]))

    def whole(self, answer: object) -> object:
        """Return the engines' answers with those to the other prompts: no token, as at the limit of length."""
        if all(self.is_sent):
            return answer
        given = iter(answer if isinstance(answer, list) else [answer])
        each = zip(self.prompts, self.is_sent, strict=True)
        whole = [next(given) if sent else _cut_off(ids) for ids, sent in each for _ in range(self.num_answers)]
        return whole if self.is_batch or len(whole) > 1 else whole[0]


def _holds(prompt: list[int], part: np.ndarray) -> bool:
    return next(places_of(part, np.array(prompt, np.int32)), None) is not None


def _chosen(value: object, is_chosen: Sequence[bool]) -> object:
    """The values of some prompts, where there is one for each."""
    if not isinstance(value, list) or len(value) != len(is_chosen):
        return value
    return [one for one, chosen in zip(value, is_chosen, strict=True) if chosen]


def _as_engines_take(ids: list[int], images: Sequence[object], media: MediaTokens) -> tuple[list[int], int | None]:
    """(ids with one placeholder for each image, how many there are with all), the latter None where it is not known."""
    if not images:
        return ids, None
    try:
        counts = [_num_tokens(image) for image in images]
    except ValueError:
        if ids.count(media.image) != len(images):
            raise
        return ids, None  # the engine may read what is not read here
    if ids.count(media.image) == len(images):
        return ids, len(ids) + sum(counts) - len(counts)
    tokens = np.array(ids, np.int32)
    is_image = tokens == media.image
    edges = np.flatnonzero(np.diff(is_image, prepend=False, append=False)).reshape(-1, 2)
    if (runs := np.diff(edges)[:, 0].tolist()) != counts:
        raise ValueError(f"input_ids have runs of {runs} placeholders, and the images have {counts} tokens")
    is_image[edges[:, 0]] = False  # the first of each stays
    return tokens[~is_image].tolist(), len(ids)


def _num_tokens(image: object) -> int:
    from fusionrl.data.image_rows import image_file

    limits = IMAGES.engine_limits
    assert limits is not None, "the store was not told the model's settings of images"
    return limits.num_tokens(*limits.fit(*image_size(image_file(image, Path()).content)))


def _cut_off(prompt: list[int]) -> dict[str, object]:
    counts = {"prompt_tokens": len(prompt), "completion_tokens": 0, "cached_tokens": 0}
    meta = {"id": "", "finish_reason": {"type": "length", "length": 0}, "output_token_logprobs": [], **counts}
    return {"text": "", "output_ids": [], "meta_info": meta}


async def post(
    url: str, payload: Mapping[str, object], max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST `payload` as JSON and return the JSON that is answered; the run's own engines get their key by themselves.

    Broken connections and 5xx answers are tried again, with growing pauses of up to 8 s. Answers of the policy's
    engines are noted, so that the samples that a generate or rollout function makes get their weight versions. They
    get one placeholder for each image, whether `input_ids` have one or as many as it has tokens. None gets ids with a
    placeholder that the model has sampled: the answer has no token then, and the finish reason "length". With several
    adapters (--lora-adapters), a generate function's requests go to that of its sample; elsewhere, or to ask another
    adapter, put "lora_path": NAME into the payload ("base": the model without one). Raises
    ValueError for a request to /generate without a token, of which an engine dies, or with other placeholders. Raises
    RuntimeError with the server's text for a 4xx answer, or the last failed try.
    """
    ids = payload.get("input_ids")
    if url.endswith("/generate") and isinstance(ids, list) and (not ids or [] in ids):
        raise ValueError(f"post to {url}: input_ids is empty; give the tokens of the prompt")
    answers = answers_of(url) if url.endswith("/generate") else None
    if answers is not None and answers.adapter is not None:
        payload = {"lora_path": answers.adapter, **payload}
    if answers is not None:
        forbid_replay("post")
        payload = _seeded(payload)
    request = None if answers is None else FunctionRequest.of(payload, answers.barred)
    if answers is None or request is None:
        answer = await _post(url, payload, max_retries, headers)
        note_answer(url, answer, payload)
        return answer
    answer = []
    if request.payload is not None:
        answer = await _post(url, request.payload, max_retries, headers)
        request.read(answer, answers)
        note_answer(url, answer, request.payload)
    return request.whole(answer)


def _seeded(payload: Mapping[str, object]) -> Mapping[str, object]:
    """Return a function's request with a seed of its sample, if it asks for one answer and has no seed."""
    seeds, params, ids = seeds_in_context(), payload.get("sampling_params") or {}, payload.get("input_ids")
    is_batch = (isinstance(ids, list) and isinstance(ids[0], list)) or isinstance(payload.get("text"), list)
    if seeds is None or is_batch or not isinstance(params, Mapping) or params.get("n", 1) != 1:
        return payload
    if params.get("sampling_seed") is not None:
        return payload
    position = len(ids) if isinstance(ids, list) else 0
    return {**payload, "sampling_params": {**params, "sampling_seed": seeds.next(position)}}
