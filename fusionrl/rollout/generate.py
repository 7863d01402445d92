"""Turns, samples and groups: generated and scored, each by the user's function where there is one.

Tokens in, tokens out: what the engine returned is what is trained; nothing is tokenized again.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.config.hooks import awaited_hook, load_function, takes_input, user_code
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample, is_reward_lost, lacks_reward, reward_value
from fusionrl.data.sample_fields import as_version, note_request
from fusionrl.data.sample_images import expand_prompt, prompt_images, prompt_of
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.data.train_batch import join_attempt
from fusionrl.engines.answers import AnswerError, routed_experts
from fusionrl.engines.client import Generation
from fusionrl.observe.spans import course, part
from fusionrl.rewards.dispatch import RewardSettings, length_reward, score_group, score_sample
from fusionrl.rollout.event_loop import LoopSemaphore
from fusionrl.rollout.generate_state import (
    GENERATED,
    SCORED,
    client_of,
    is_stopping,
    samples_in_flight,
    semaphore_of,
    within,
)
from fusionrl.rollout.request_seeds import begin_sample, sampling, seeds_in_context
from fusionrl.rollout.turn_versions import forbid_replay, turns_in_context
from fusionrl.rollout.types import NO_ROOM_AFTER, Limits, check_samples
from fusionrl.rollout.weight_versions import (
    OriginalResponse,
    fill_versions,
    noting_answers,
    warn_of_unsampled,
    warn_once,
)

SamplingParams = dict[str, Any]  # SGLang's
_CONTEXT = 5  # tokens before an answer that SGLang decodes with it
_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


# ------------------------------------------------------------------------------------------------ a turn
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
    client, turns = client_of(args), turns_in_context()
    asked = client.generate if turns is None else partial(turns.generate, client)
    answer = await asked(payload, sample.session_id)
    _check_images(sample, answer, sample.num_tokens)
    part("turn", start, **_engine_facts(answer))
    text = answer.text
    if answer.part > 1:
        text = _decoded(args, np.asarray(sample.array("tokens")), answer.tokens, sampling_params)
    _append(args, sample, answer, text, sample.response_length, sampling_params)
    return answer


def _check_images(sample: Sample, answer: Generation, num_asked: int) -> None:
    """Check that the engine has read as many tokens of a sample with images as there are here."""
    if sample.image_spans and answer.finish_reason != "abort":
        from fusionrl.rollout.image_requests import check_expanded

        check_expanded(answer.prompt_tokens, num_asked, f"sample {sample.index}")


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
    forbid_replay("stream_generate")
    async with aclosing(client_of(args).stream(payload, sample.session_id)) as pieces:
        async for piece in pieces:
            if piece.part == 1:
                _check_images(sample, piece, num_asked)
            _append(args, sample, piece, piece.text, done, sampling_params)
            if piece.finish_reason and piece.part > 1:
                asked, answered = np.split(np.asarray(sample.array("tokens")), [num_asked])
                sample.response = before + _decoded(args, asked, answered, sampling_params)
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
    if IMAGES.processor is None:
        tokens: dict[str, Any] | None = {"input_ids": np.asarray(sample.array("tokens")).tolist()}
    else:
        from fusionrl.rollout.image_requests import request_tokens

        tokens = await request_tokens(args, sample, IMAGES.processor)
    if tokens is None:
        sample.append_response_tokens(tokens=[], log_probs=[], finish_reason="length")
        return None
    if is_stopping(args):
        sample.status = Sample.Status.ABORTED
        return None
    seeds = seeds_in_context() or begin_sample(args, sample.index)
    own_seed = params.get("sampling_seed")
    seed = seeds.next(sample.num_tokens) if own_seed is None else own_seed
    return {
        **tokens,
        "sampling_params": dict(params, max_new_tokens=limit, sampling_seed=seed),
        "return_logprob": True,
        **({"return_routed_experts": True} if getattr(args, "routed_experts_size", None) else {}),
        **({} if sample.adapter is None else {"lora_path": sample.adapter}),
    }


def _add_routed_experts(args: Namespace, sample: Sample, answer: Generation) -> None:
    """Add the experts that the engine chose for the request's tokens and the answer's, [tokens - 1, layers, topk].

    None where the engine was not asked, or died and no other may continue: trainers choose the experts. An aborted
    sample is continued, and then the engine reports on all tokens.
    """
    layers_and_topk = getattr(args, "routed_experts_size", None)
    if not layers_and_topk or answer.finish_reason == "abort" or answer.meta_info.get("finish_reason") is None:
        return
    size = (sample.num_tokens - 1, *layers_and_topk)
    try:
        sample.rollout_routed_experts = routed_experts(answer.meta_info, size, getattr(args, "num_experts", None))
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
    names = {"e2e_latency": "engine_s", "queue_time": "queue_s", "first_token_latency": "first_token_s"}
    facts: dict[str, float] = {"tokens": len(answer.tokens)}
    meta = answer.meta_info
    facts |= {name: float(meta[key]) for key, name in names.items() if isinstance(meta.get(key), int | float)}
    return facts | ({"version": as_version(answer.weight_versions[0][0])} if answer.weight_versions else {})


def _versions(answer: Generation) -> np.ndarray:
    """[n] int32: the version of the weights that sampled each token."""
    spans = [np.full(count, as_version(version), np.int32) for version, count in answer.weight_versions]
    return spans[0] if len(spans) == 1 else np.concatenate([np.zeros(0, np.int32), *spans])


def _decoded(args: Namespace, asked: np.ndarray, answered: np.ndarray, params: SamplingParams) -> str:
    """Return the text of an answer of several requests: a character may lie across a seam, where each had half of it.

    Decode it behind the last tokens of what was asked, as engines do: some tokenizers drop a space at a text's start.
    """
    skip, context = params.get("skip_special_tokens", True), asked[-_CONTEXT:].tolist()
    decode = partial(load_tokenizer(args.hf_checkpoint).decode, skip_special_tokens=skip)
    return str(decode([*context, *answered.tolist()])[len(decode(context)) :])


# ------------------------------------------------------------------------------------------------ a sample
@dataclass(frozen=True)
class SampleContext:
    """Settings by which the samples and groups of a rollout, or of an evaluation set, are generated and scored."""

    args: Namespace  # as users' functions get them
    filter_path: str | None  # --dynamic-sampling-filter-path
    semaphore: LoopSemaphore  # bounds the samples under way
    rewards: RewardSettings
    limits: Limits
    policy_urls: tuple[str, ...]  # of the engines and their router
    needs_greedy_answer: bool  # the estimator compares with the greedy answer to the prompt
    on_generated: Callable[[], None] | None = None  # called when a sample needs no engine any more

    @classmethod
    def of_args(cls, args: Namespace) -> SampleContext:
        """Read them from a hook's `args`, which a user may have made."""
        urls = [getattr(args, "router_url", None), *(getattr(args, "engine_urls", None) or ())]
        estimator = getattr(args, "advantage_estimator", None)
        return cls(
            args=args,
            filter_path=getattr(args, "dynamic_sampling_filter_path", None),
            semaphore=semaphore_of(args),
            rewards=RewardSettings.of_args(args),
            limits=Limits.of_args(args),
            policy_urls=tuple(url for url in urls if url),
            needs_greedy_answer=estimator is not None and ESTIMATORS[estimator].needs_greedy_answer,
        )


async def generate_and_score(
    context: SampleContext, sample: Sample, params: SamplingParams, evaluation: bool = False, number: int = 0
) -> Sample | list[Sample]:
    """Generate one sample and score it; a user's function may make several of it.

    number  of the sample among its siblings, whose seeds follow one another
    """
    is_lost = sample.status == Sample.Status.FAILED and is_reward_lost(sample)
    if not evaluation and (sample.status in _FINISHED or is_lost):
        return sample  # a sibling of one that was aborted in an earlier rollout: it is finished and scored
    path = sample.generate_function_path or context.args.custom_generate_function_path
    limit_s: float | None = getattr(context.args, "sample_timeout", None)
    index, group = (-1 if number is None else int(number) for number in (sample.index, sample.group_index))
    making: Coroutine[Any, Any, Sample | list[Sample]]
    with (
        course(index=index, group=group, evaluation=int(evaluation)) as facts,
        sampling(context.args, sample.index, number, evaluation),
    ):
        start = time.monotonic_ns()
        async with context.semaphore:
            part("wait", start)
            if path is None:
                making = generate(context.args, sample, params)
            else:
                making = custom_generate(context, path, sample, params, evaluation)
            with samples_in_flight.note(GENERATED, sample):
                result = await (making if limit_s is None else within(limit_s, sample, making))
        if context.on_generated is not None:
            context.on_generated()
        samples = as_list(result)
        join_attempt(samples, sample.index)
        if context.args.rollout_sample_hook_path:
            samples = [await apply_sample_hooks(context, item, evaluation) for item in samples]
        with samples_in_flight.note(SCORED, sample):
            await _add_rewards(context, samples, isinstance(result, list), evaluation)
        for item in samples:
            samples_in_flight.scored(item)
        for last in samples[-1:]:
            facts |= {"status": str(getattr(last.status, "value", last.status)), "tokens": int(last.response_length)}
    return samples if isinstance(result, list) else samples[0]


async def _add_rewards(context: SampleContext, samples: list[Sample], are_several: bool, evaluation: bool) -> None:
    """Fill in the rewards that are missing; those of --group-rm wait for the group."""
    if context.rewards.is_group_call:
        if evaluation:  # an evaluation has no groups: the group function sees one sample at a time
            for item in samples:
                item.reward = (await score_group(context.rewards, [item]))[0]
        return
    missing = [item for item in samples if item.reward is None and not lacks_reward(item)]
    if missing and are_several:
        for item, reward in zip(missing, await score_group(context.rewards, missing), strict=True):
            item.reward = reward
    elif missing:
        missing[0].reward = await score_sample(context.rewards, missing[0])


async def custom_generate(
    context: SampleContext, path: str, sample: Sample, params: SamplingParams, evaluation: bool
) -> Sample | list[Sample]:
    """Call the user's generate function on a sample; returns one or several, each checked.

    Raises HookError if it raised, or returned something other than samples, or one whose fields do not fit together.
    """
    field, function = "custom_generate_function_path", load_function(path)
    if takes_input(field, function):
        from fusionrl.rollout.miles_inputs import generate_function

        function = generate_function(path)
    keywords = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    before = OriginalResponse.of(sample)
    where = f"--custom-generate-function-path {path}"
    if vars(sample)["weight_versions"] is None:
        sample.weight_versions = []  # slime's functions append to it
    with noting_answers(context.policy_urls) as answers, user_code(where, path, sample):
        if IMAGES.processor is not None:
            from fusionrl.rollout.image_requests import barred_parts

            answers.barred += barred_parts(sample)
        answers.adapter = sample.adapter
        result = function(context.args, sample, copy.deepcopy(params), **keywords)
        if inspect.isawaitable(result):
            result = await result
        else:
            warn_once(
                f"{where}: not async",
                f"{where}: it is not async, so all other samples wait for as long as it runs; write async def, and"
                " await what takes time",
            )
    samples = as_list(result)
    valid = [item for item in samples if isinstance(item, Sample)]
    for item in valid:
        item.adapter = item.adapter or sample.adapter
    warn_of_unsampled(valid, answers, where, before)
    fill_versions(valid, answers, where, before)
    check_samples(field, path, samples, context.limits)
    return result


async def apply_sample_hooks(context: SampleContext, sample: Sample, evaluation: bool) -> Sample:
    """Return the sample as the functions of --rollout-sample-hook-path leave it."""
    field = "rollout_sample_hook_path"
    for path in context.args.rollout_sample_hook_path or ():
        rollout_id = getattr(context.args, "rollout_id", None)
        output = await awaited_hook(field, path, context.args, sample, rollout_id=rollout_id, evaluation=evaluation)
        sample = sample if output is None else output
        check_samples(field, path, [sample], context.limits)
    return sample


def as_list(result: Sample | list[Sample]) -> list[Sample]:
    """Return the samples that a generate function made of one."""
    return result if isinstance(result, list) else [result]


# ------------------------------------------------------------------------------------------------ a group
def flat_group(results: Sequence[Sample | list[Sample]]) -> list[Sample]:
    """Return the samples of `generate_group` one after the other."""
    return [sample for result in results for sample in as_list(result)]


async def generate_group(
    context: SampleContext, group: list[Sample], params: SamplingParams, evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """Make all samples of one prompt; with --group-rm they are scored together, once all are finished.

    What a generate function made of one sample stays together, as slime returns it. Where the greedy answer that the
    estimator needs has no reward, nothing compares with it: its group is FAILED.
    """
    makes = asyncio.gather(
        *(generate_and_score(context, sample, dict(params), evaluation, i) for i, sample in enumerate(group))
    )
    needs_baseline = context.needs_greedy_answer and not evaluation and group[0].baseline_reward is None
    baseline: float | None = None
    if needs_baseline:
        results, baseline = await asyncio.gather(makes, _greedy_reward(context, group[0], params))
    else:
        results = await makes
    samples = flat_group(results)
    comes_again = is_stopping(context.args) and any(s.status == Sample.Status.ABORTED for s in samples)
    if context.rewards.is_group_call and not comes_again and any(s.reward is None for s in samples):
        for sample, reward in zip(samples, await score_group(context.rewards, samples), strict=True):
            sample.reward = reward
    if needs_baseline:
        for sample in samples:
            sample.baseline_reward = baseline
            if baseline is None and not is_stopping(context.args):  # else the next rollout computes it
                sample.status = Sample.Status.FAILED
    return results


async def _greedy_reward(context: SampleContext, sample: Sample, params: SamplingParams) -> float | None:
    """The reward of the greedy answer to a sample's prompt, shaped as others are; None where it has none."""
    samples = await generate_and_score(context, prompt_of(sample), dict(params, temperature=0.0, top_p=1.0, top_k=-1))
    answer = as_list(samples)[0]
    rewards, args = context.rewards, context.args
    if answer.reward is None and not lacks_reward(answer):
        answer.reward = (await score_group(rewards, [answer]))[0]
    if lacks_reward(answer):  # one that failed is as one whose reward function fails
        return None if answer.status == Sample.Status.ABORTED else rewards.failure_value
    try:
        value = reward_value(answer.reward, args.reward_key, "--reward-key")
    except ValueError as error:
        raise ValueError(f"sample {answer.index}: {error}") from error
    return value + length_reward(answer.response_length, args.rollout_max_response_len, args)
