"""One turn of the model: the request that continues a sample's tokens, and what its answer adds to the sample.

Tokens in, tokens out: what the engine returned is what is trained; nothing is tokenized again.
"""

import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import adopt_images, expand_prompt, prompt_images
from fusionrl.data.sampling import as_version, note_request
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.answer_checks import AnswerError, routed_experts
from fusionrl.engines.client import GenerateClient, Generation
from fusionrl.observe.spans import part
from fusionrl.rollout.generate_state import client_of, is_stopping
from fusionrl.rollout.image_requests import check_length, make_images, may_not_return, request_tokens
from fusionrl.rollout.types import NO_ROOM_AFTER

SamplingParams = dict[str, Any]  # SGLang's


async def generate(args: Namespace, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Generate the response of one sample, or continue one that was aborted: the default of
    --custom-generate-function-path."""
    done = sample.response_length
    _begin(args, sample)
    await generate_turn(args, sample, sampling_params, done)
    return sample


async def generate_turn(
    args: Namespace, sample: Sample, sampling_params: SamplingParams, done: int = 0, longest: int | None = None
) -> Generation | None:
    """Let the model continue `sample.tokens`, and append what it sampled; the sample gets the turn's status.

    `done` are tokens of the same turn that an earlier rollout left; `longest` bounds this turn alone. Returns None,
    with status TRUNCATED, if no room is left (`room`) or the model has sampled a placeholder of an image or another
    medium, which no engine may get back; and with status ABORTED if the rollout has ended.
    """
    if not sample.num_tokens:  # such a request kills an engine
        if sample.prompt_tokens is not None and not len(sample.prompt_tokens):
            raise ValueError(_empty_prompt(sample))
        raise ValueError(
            f"sample {sample.index} has no tokens to continue: call begin(args, sample) first, or set sample.tokens"
            " to the tokens of the prompt"
        )
    payload = await _payload(args, sample, sampling_params, done)
    if payload is None:
        return None
    if longest is not None:
        params = payload["sampling_params"]
        payload["sampling_params"] = dict(params, max_new_tokens=min(longest, params["max_new_tokens"]))
    start = time.monotonic_ns()
    answer = await _client(args).generate(payload, sample.session_id)
    check_length(sample, answer, sample.num_tokens)
    part("turn", start, **_engine_facts(answer))
    text = answer.text if answer.part == 1 else _decoded(args, answer.tokens, sampling_params)
    _append(args, sample, answer, text, sample.response_length, sampling_params)
    return answer


def _client(args: Namespace) -> GenerateClient:
    client = client_of(args)
    assert client is not None, "args.generate_client is set within a rollout"
    return client


def _append(
    args: Namespace, sample: Sample, answer: Generation, text: str, turn_start: int, params: SamplingParams
) -> None:
    """Append an answer, or a piece of one, to the response; `turn_start` is the place of the turn's first token."""
    sample.append_response_tokens(
        tokens=answer.tokens,
        log_probs=answer.log_probs,
        versions=_versions(answer),
        text=text,
        finish_reason=answer.finish_reason or "stop",
    )
    note_request(sample, turn_start, params)
    if answer.finish_reason:
        _add_routed_experts(args, sample, answer)
        if "spec_verify_ct" in answer.meta_info:  # drafts of an engine that speculates
            sample.spec_info.add(answer.meta_info)


async def stream_generate(
    args: Namespace, sample: Sample, sampling_params: SamplingParams
) -> AsyncGenerator[Generation, None]:
    """`generate`, piece by piece as the engine samples: each is in the sample when it is yielded.

        async with contextlib.aclosing(stream_generate(args, sample, sampling_params)) as pieces:
            async for piece in pieces:
                if enough(sample.response):
                    break

    Leaving the loop ends the request; the sample is COMPLETED with what it has. A loop that goes to the end leaves the
    status of `generate`. If an engine dies, another continues; then stop strings see only the tokens since.
    """
    done, before = sample.response_length, sample.response
    _begin(args, sample)
    payload, num_asked = await _payload(args, sample, sampling_params, done), sample.num_tokens
    if payload is None:
        return
    async with aclosing(_client(args).stream(payload, sample.session_id)) as pieces:
        async for piece in pieces:
            if piece.part == 1:
                check_length(sample, piece, num_asked)
            _append(args, sample, piece, piece.text, done, sampling_params)
            if piece.finish_reason and piece.part > 1:
                answered = np.asarray(sample.array("tokens"))[num_asked:]
                sample.response = before + _decoded(args, answered, sampling_params)
            yield piece


def clear_response(sample: Sample) -> None:
    """Forget the response that an earlier rollout left: the sample begins anew."""
    vars(sample).update(prompt_images(sample))
    sample.tokens, sample.response, sample.response_length = [], "", 0
    sample.loss_mask = sample.rollout_log_probs = sample.weight_versions = sample.teacher_log_probs = None
    sample.rollout_routed_experts = None
    sample.status = Sample.Status.PENDING


def _begin(args: Namespace, sample: Sample) -> None:
    """Put the prompt's tokens into a sample that has no tokens yet: a hook may have set them."""
    if not sample.response_length and not sample.num_tokens:
        sample.tokens = prompt_tokens(args, sample)
        if not sample.num_tokens:
            raise ValueError(_empty_prompt(sample))


def _empty_prompt(sample: Sample) -> str:
    return (
        f"sample {sample.index}: its prompt {sample.prompt!r:.80} has no tokens (label {sample.label!r:.80}); give its"
        " row of the prompt data a text in the column of --input-key, or leave the row out"
    )


def room(args: Namespace, sample: Sample, sampling_params: SamplingParams) -> int:
    """Tokens by which the sample may still grow.

    --rollout-max-context-len bounds all of it; without that flag, the response (the tokens of tools included) is
    bounded by its own limit, so that a sample is never longer than the trainers expect.
    """
    if (max_context_len := getattr(args, "rollout_max_context_len", None)) is not None:
        return int(max_context_len - sample.num_tokens)
    return int(sampling_params["max_new_tokens"] - sample.response_length)


def note_no_room(sample: Sample) -> None:
    """Note in the metadata after how many turns of the model no room was left; the run warns where it was one.

    Turns are counted as stretches of tokens that are trained on: what tools say between them has mask 0.
    """
    loss_mask = sample.array("loss_mask")
    mask = np.ones(sample.response_length, bool) if loss_mask is None else loss_mask != 0
    num_turns = int(mask[:1].sum() + (mask[1:] & ~mask[:-1]).sum())
    sample.metadata = {**(sample.metadata or {}), NO_ROOM_AFTER: num_turns}


def prompt_tokens(args: Namespace, sample: Sample) -> np.ndarray:
    """[prompt_length] int32: the ids made when the data was read, or the prompt's text tokenized now, images expanded.

    Raises ValueError if the prompt is a list of messages, or has other placeholders than images.
    """
    if sample.prompt_tokens is not None:
        return sample.prompt_tokens
    if not isinstance(sample.prompt, str):
        raise ValueError("the prompt is a list of messages: add --apply-chat-template")
    ids = load_tokenizer(args.hf_checkpoint).encode(sample.prompt, add_special_tokens=False)
    return expand_prompt(sample, np.asarray(ids, np.int32))


async def _payload(args: Namespace, sample: Sample, params: SamplingParams, done: int) -> dict[str, Any] | None:
    """Return the request that continues `sample.tokens`; None, with the status set, if none is needed."""
    limit = min(params["max_new_tokens"] - done, room(args, sample, params))
    if limit < 1:
        if not done:  # else the turn is one that an earlier rollout began
            note_no_room(sample)
        sample.append_response_tokens(tokens=[], log_probs=[], finish_reason="length")
        return None
    if IMAGES.processor is not None:
        adopt_images(sample, IMAGES.processor)
    if may_not_return(sample):
        sample.append_response_tokens(tokens=[], log_probs=[], finish_reason="length")
        return None
    await make_images(args, sample)
    if is_stopping(args):
        sample.status = Sample.Status.ABORTED
        return None
    return {
        **request_tokens(args, sample),
        "sampling_params": dict(params, max_new_tokens=limit),
        "return_logprob": True,
        **({"return_routed_experts": True} if _experts_size(args) else {}),
        **({} if sample.adapter is None else {"lora_path": sample.adapter}),
    }


def _add_routed_experts(args: Namespace, sample: Sample, answer: Generation) -> None:
    """Add the experts that the engine chose for the request's tokens and the answer's, [tokens - 1, layers, topk]."""
    if not _experts_size(args) or answer.finish_reason == "abort":
        return  # an aborted sample is continued, and then the engine reports on all tokens
    if answer.meta_info.get("finish_reason") is None:
        return  # the engine died, and no other may continue: trainers choose the experts
    size = (sample.num_tokens - 1, *_experts_size(args))
    try:
        sample.rollout_routed_experts = routed_experts(answer.meta_info, size, getattr(args, "num_experts", None))
    except AnswerError as error:
        raise AnswerError(
            f"--use-rollout-routing-replay: sample {sample.index}: {error}; does the engine's SGLang know"
            " --enable-return-routed-experts?"
        ) from error


def _experts_size(args: Namespace) -> tuple[int, int] | tuple[()]:
    """(layers, experts of a token), where the engine is asked which experts it chose; else empty."""
    return getattr(args, "routed_experts_size", None) or ()


def _engine_facts(answer: Generation) -> dict[str, float]:
    """Return tokens of the answer, the version of the first, and the engine's times in seconds.

    engine_s    from its receipt of the request to its end
    queue_s     of that, before the first forward pass; first_token_s, to the first token. With SGLang's
                --enable-metrics alone
    """
    names = {"e2e_latency": "engine_s", "queue_time": "queue_s", "first_token_latency": "first_token_s"}
    facts: dict[str, float] = {"tokens": len(answer.tokens)}
    meta = answer.meta_info
    facts |= {name: float(meta[key]) for key, name in names.items() if isinstance(meta.get(key), int | float)}
    return facts | ({"version": as_version(answer.weight_versions[0][0])} if answer.weight_versions else {})


def _versions(answer: Generation) -> np.ndarray:
    """[n] int32: the version of the weights that sampled each token."""
    spans = [np.full(count, as_version(version), np.int32) for version, count in answer.weight_versions]
    return spans[0] if len(spans) == 1 else np.concatenate([np.zeros(0, np.int32), *spans])


def _decoded(args: Namespace, tokens: Sequence[int] | np.ndarray, params: SamplingParams) -> str:
    """The text of an answer of several engines: a character may lie across a seam, where each had half of it."""
    skip = params.get("skip_special_tokens", True)
    return load_tokenizer(args.hf_checkpoint).decode(np.asarray(tokens).tolist(), skip_special_tokens=skip)
