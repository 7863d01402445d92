"""One turn of the model: the request that continues a sample's tokens, and what its answer adds to the sample.

Tokens in, tokens out: what the engine returned is what is trained; nothing is tokenized again.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusionrl.data.sample import Sample
from fusionrl.data.sampling import note_request
from fusionrl.data.token_versions import as_version
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.answer_checks import AnswerError, routed_experts
from fusionrl.engines.client import GenerateClient, Generation
from fusionrl.observe.spans import part
from fusionrl.rollout.generate_state import client_of, is_stopping_of
from fusionrl.rollout.types import NO_ROOM_AFTER

SamplingParams = dict[str, Any]  # SGLang's


@dataclass(frozen=True)
class TurnSettings:
    """Everything that a turn depends on, other than the sample.

    client           None where no request is made
    tokenizer        folder of the policy's tokenizer (--hf-checkpoint)
    max_context_len  limit of prompt and response together; None: the response has a limit of its own
    experts_size     (layers, experts of a token), where the engine is asked which experts it chose
    num_experts      of a layer; None: not known
    is_stopping      says whether the rollout has ended; None: it does not end
    """

    client: GenerateClient | None
    tokenizer: str
    max_context_len: int | None
    experts_size: tuple[int, int] | None
    num_experts: int | None
    is_stopping: Callable[[], bool] | None

    @classmethod
    def of_args(cls, args: Namespace) -> TurnSettings:
        """Read them from a hook's `args`, which a user may have made."""
        return cls(
            client_of(args),
            getattr(args, "hf_checkpoint", ""),
            getattr(args, "rollout_max_context_len", None),
            getattr(args, "routed_experts_size", None),
            getattr(args, "num_experts", None),
            is_stopping_of(args),
        )


async def generate_sample(settings: TurnSettings, sample: Sample, params: SamplingParams) -> Sample:
    """Generate the response of one sample, or continue one that was aborted."""
    done = sample.response_length
    _begin(settings, sample)
    await take_turn(settings, sample, params, done)
    return sample


async def take_turn(
    settings: TurnSettings, sample: Sample, params: SamplingParams, done: int = 0, longest: int | None = None
) -> Generation | None:
    """Take one turn; see `sglang_rollout.generate_turn`."""
    if not sample.num_tokens:  # such a request kills an engine
        if sample.prompt_tokens is not None and not len(sample.prompt_tokens):
            raise ValueError(_empty_prompt(sample))
        raise ValueError(
            f"sample {sample.index} has no tokens to continue: call begin(args, sample) first, or set sample.tokens"
            " to the tokens of the prompt"
        )
    payload = _payload(settings, sample, params, done)
    if payload is None:
        return None
    if longest is not None:
        payload_params = payload["sampling_params"]
        payload["sampling_params"] = dict(payload_params, max_new_tokens=min(longest, payload_params["max_new_tokens"]))
    assert settings.client is not None, "args.generate_client is set within a rollout"
    start = time.monotonic_ns()
    answer = await settings.client.generate(payload, sample.session_id)
    part("turn", start, **_engine_facts(answer))
    text = answer.text if answer.part == 1 else _decoded(settings, answer.tokens, params)
    _append(settings, sample, answer, text, sample.response_length, params)
    return answer


def _append(
    settings: TurnSettings, sample: Sample, answer: Generation, text: str, turn_start: int, params: SamplingParams
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
        _add_routed_experts(settings, sample, answer)
        if "spec_verify_ct" in answer.meta_info:  # drafts of an engine that speculates
            sample.spec_info.add(answer.meta_info)


async def stream_sample(
    settings: TurnSettings, sample: Sample, params: SamplingParams
) -> AsyncGenerator[Generation, None]:
    """`generate_sample`, piece by piece; see `sglang_rollout.stream_generate`."""
    done = sample.response_length
    _begin(settings, sample)
    payload = _payload(settings, sample, params, done)
    if payload is None:
        return
    before = sample.response
    assert settings.client is not None, "args.generate_client is set within a rollout"
    async with aclosing(settings.client.stream(payload, sample.session_id)) as pieces:
        async for piece in pieces:
            _append(settings, sample, piece, piece.text, done, params)
            if piece.finish_reason and piece.part > 1:
                answered = np.asarray(sample.array("tokens"))[len(payload["input_ids"]) :]
                sample.response = before + _decoded(settings, answered, params)
            yield piece


def clear_response(sample: Sample) -> None:
    """Forget the response that an earlier rollout left: the sample begins anew."""
    sample.tokens, sample.response, sample.response_length = [], "", 0
    sample.loss_mask = sample.rollout_log_probs = sample.weight_versions = sample.teacher_log_probs = None
    sample.rollout_routed_experts = None
    sample.status = Sample.Status.PENDING


def _begin(settings: TurnSettings, sample: Sample) -> None:
    """Put the prompt's tokens into a sample that has no tokens yet: a hook may have set them."""
    if not sample.response_length and not sample.num_tokens:
        sample.tokens = prompt_ids(settings.tokenizer, sample)
        if not sample.num_tokens:
            raise ValueError(_empty_prompt(sample))


def _empty_prompt(sample: Sample) -> str:
    return (
        f"sample {sample.index}: its prompt {sample.prompt!r:.80} has no tokens (label {sample.label!r:.80}); give its"
        " row of the prompt data a text in the column of --input-key, or leave the row out"
    )


def room_left(max_context_len: int | None, sample: Sample, params: SamplingParams) -> int:
    """Tokens by which the sample may still grow.

    --rollout-max-context-len bounds all of it; without that flag, the response (the tokens of tools included) is
    bounded by its own limit, so that a sample is never longer than the trainers expect.
    """
    if max_context_len is not None:
        return max_context_len - sample.num_tokens
    return params["max_new_tokens"] - sample.response_length


def note_no_room(sample: Sample) -> None:
    """Note in the metadata after how many turns of the model no room was left; the run warns where it was one.

    Turns are counted as stretches of tokens that are trained on: what tools say between them has mask 0.
    """
    sample.metadata = {**(sample.metadata or {}), NO_ROOM_AFTER: _num_turns(sample)}


def prompt_ids(tokenizer: str, sample: Sample) -> np.ndarray:
    """[prompt_length] int32: the ids made when the data was read, or the prompt's text tokenized now.

    Raises:
        ValueError: the prompt is a list of messages.
    """
    if sample.prompt_tokens is not None:
        return sample.prompt_tokens
    if not isinstance(sample.prompt, str):
        raise ValueError("the prompt is a list of messages: add --apply-chat-template")
    return np.asarray(load_tokenizer(tokenizer).encode(sample.prompt, add_special_tokens=False), np.int32)


def _payload(settings: TurnSettings, sample: Sample, params: SamplingParams, done: int) -> dict[str, Any] | None:
    """Return the request that continues `sample.tokens`; None, with the status set, if none is needed."""
    limit = min(params["max_new_tokens"] - done, room_left(settings.max_context_len, sample, params))
    if limit < 1:
        if not done:  # else the turn is one that an earlier rollout began
            note_no_room(sample)
        sample.append_response_tokens(tokens=[], log_probs=[], finish_reason="length")
        return None
    if settings.is_stopping is not None and settings.is_stopping():
        sample.status = Sample.Status.ABORTED
        return None
    return {
        "input_ids": np.asarray(sample.array("tokens")).tolist(),
        "sampling_params": dict(params, max_new_tokens=limit),
        "return_logprob": True,
        **({"return_routed_experts": True} if settings.experts_size else {}),
    }


def _add_routed_experts(settings: TurnSettings, sample: Sample, answer: Generation) -> None:
    """Add the experts that the engine chose for the request's tokens and the answer's, [tokens - 1, layers, topk]."""
    if not settings.experts_size or answer.finish_reason == "abort":
        return  # an aborted sample is continued, and then the engine reports on all tokens
    size = (sample.num_tokens - 1, *settings.experts_size)
    try:
        sample.rollout_routed_experts = routed_experts(answer.meta_info, size, settings.num_experts)
    except AnswerError as error:
        raise AnswerError(
            f"--use-rollout-routing-replay: sample {sample.index}: {error}; does the engine's SGLang know"
            " --enable-return-routed-experts?"
        ) from error


def _engine_facts(answer: Generation) -> dict[str, float]:
    """Return tokens of the answer, the version of the first, and the engine's times in seconds.

    engine_s    from its receipt of the request to its end
    queue_s     of that, before the first forward pass; first_token_s, to the first token. With SGLang's
                --enable-metrics alone
    """
    meta, names = answer.meta_info, {"e2e_latency": "engine_s", "queue_time": "queue_s"}
    names["first_token_latency"] = "first_token_s"
    facts: dict[str, float] = {"tokens": len(answer.tokens)}
    facts |= {name: float(meta[key]) for key, name in names.items() if isinstance(meta.get(key), int | float)}
    return facts | ({"version": as_version(answer.weight_versions[0][0])} if answer.weight_versions else {})


def _versions(answer: Generation) -> np.ndarray:
    """[n] int32: the version of the weights that sampled each token."""
    spans = [np.full(count, as_version(version), np.int32) for version, count in answer.weight_versions]
    return spans[0] if len(spans) == 1 else np.concatenate([np.zeros(0, np.int32), *spans])


def _decoded(settings: TurnSettings, tokens: Sequence[int] | np.ndarray, params: SamplingParams) -> str:
    """The text of an answer of several engines: a character may lie across a seam, where each had half of it."""
    skip = params.get("skip_special_tokens", True)
    return load_tokenizer(settings.tokenizer).decode(np.asarray(tokens).tolist(), skip_special_tokens=skip)


def _num_turns(sample: Sample) -> int:
    loss_mask = sample.array("loss_mask")
    if loss_mask is None:
        return int(sample.response_length > 0)
    mask = loss_mask != 0
    return int(mask[:1].sum() + (mask[1:] & ~mask[:-1]).sum())
