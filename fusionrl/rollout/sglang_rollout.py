"""The default rollout: prompts → samples by the engines behind the router → rewards → filter.

`generate_rollout` is synchronous, as slime's is; the Buffer runs it in a thread of its own. Inside, one event loop
keeps a bounded number of requests in flight.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.config.eval_sets import EvalSet, eval_sets
from fusionrl.config.hooks import HookError, awaited_hook, call_hook, load_function
from fusionrl.data.prompts import PromptColumns, load_prompts
from fusionrl.data.sample import Sample, as_version, reward_value
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.asked import AnswerError, routed_experts
from fusionrl.engines.client import GenerateClient, Generation, abort_all
from fusionrl.rewards.dispatch import async_rm, batched_async_rm
from fusionrl.rewards.length import length_reward
from fusionrl.rollout.teacher import Teacher
from fusionrl.rollout.types import (
    NO_ROOM_AFTER,
    DynamicFilterOutput,
    Limits,
    RolloutAborted,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    check_samples,
)
from fusionrl.rollout.versions import Before, fill_versions, noting_answers

ABORT_TIMEOUT_S = 30.0  # for engines to let go of what is aborted
MAX_DROPPED = 50  # dropped groups for each one wanted, before a filter that keeps next to nothing ends the run


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate `args.rollout_batch_size` groups, or evaluate every set of --eval-prompt-data or --eval-config."""
    args.rollout_id = rollout_id
    if evaluation:
        return asyncio.run(_evaluate(args))
    return asyncio.run(_generate(args, data_source))


# ------------------------------------------------------------------------------------------------ one sample
def sampling_params(args: Any) -> dict[str, Any]:
    """SGLang's sampling parameters of a rollout, from the flags."""
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "min_new_tokens": args.rollout_min_response_len,
        "ignore_eos": args.rollout_ignore_eos,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
    }
    if args.rollout_stop:
        params["stop"] = list(args.rollout_stop)
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = list(args.rollout_stop_token_ids)
    return params


def eval_sampling_params(args: Any, one: EvalSet) -> dict[str, Any]:
    """As `sampling_params`, with the settings of an evaluation set."""
    params = sampling_params(args) | {
        "temperature": one.temperature,
        "top_p": one.top_p,
        "top_k": one.top_k,
        "max_new_tokens": one.max_response_len,
        "min_new_tokens": one.min_new_tokens,
    }
    for name in ("stop", "stop_token_ids", "repetition_penalty"):
        params.pop(name, None)
        if value := getattr(one, name):
            params[name] = value
    return params


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of one sample, or go on with one that was aborted: the default of
    --custom-generate-function-path.

    Tokens in, tokens out: what the engine returned is what is trained; nothing is tokenized again.
    """
    done = sample.response_length
    if not done:
        sample.tokens = prompt_tokens(args, sample)
    await generate_turn(args, sample, sampling_params, done)
    return sample


async def generate_turn(
    args: Any, sample: Sample, sampling_params: dict[str, Any], done: int = 0, longest: int | None = None
) -> Generation | None:
    """Let the model go on from `sample.tokens`, and append what it sampled; the sample's status is the turn's.

    `done` are tokens of the same turn that an earlier rollout left; `longest` bounds this turn alone. Returns None,
    with status TRUNCATED, where there is no room left (`room`), and with status ABORTED where the rollout has ended.
    """
    payload = _turn_payload(args, sample, sampling_params, done)
    if payload is None:
        return None
    if longest is not None:
        params = payload["sampling_params"]
        payload["sampling_params"] = dict(params, max_new_tokens=min(longest, params["max_new_tokens"]))
    answer = await args.generate_client.generate(payload, **_routing(sample))
    text = answer.text if answer.part == 1 else _decoded(args, answer.tokens, sampling_params)
    sample.append_response_tokens(
        args,
        tokens=answer.tokens,
        log_probs=answer.log_probs,
        versions=_versions(answer),
        text=text,
        finish_reason=answer.finish_reason,
    )
    _add_routed_experts(args, sample, answer)
    return answer


async def stream_generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any]
) -> AsyncGenerator[Generation, None]:
    """`generate`, piece by piece as the engine samples: each is in the sample when it is yielded.

        async with contextlib.aclosing(stream_generate(args, sample, sampling_params)) as pieces:
            async for piece in pieces:
                if enough(sample.response):
                    break

    Leaving the loop ends the request; the sample is COMPLETED with what it has. A loop that goes to the end leaves the
    status of `generate`. Where an engine dies, another goes on; then stop strings see the tokens since alone.
    """
    done = sample.response_length
    if not done:
        sample.tokens = prompt_tokens(args, sample)
    payload = _turn_payload(args, sample, sampling_params, done)
    if payload is None:
        return
    before = sample.response
    async with aclosing(args.generate_client.stream(payload, **_routing(sample))) as pieces:
        async for piece in pieces:
            sample.append_response_tokens(
                args,
                tokens=piece.tokens,
                log_probs=piece.log_probs,
                versions=_versions(piece),
                text=piece.text,
                finish_reason=piece.finish_reason or "stop",
            )
            if piece.finish_reason:
                _add_routed_experts(args, sample, piece)
            if piece.finish_reason and piece.part > 1:
                sample.response = before + _decoded(args, sample.tokens[len(payload["input_ids"]) :], sampling_params)
            yield piece


def _turn_payload(args: Any, sample: Sample, sampling_params: dict[str, Any], done: int) -> dict[str, Any] | None:
    """The request that goes on from `sample.tokens`; None, with the status set, where there is nothing to ask."""
    limit = min(sampling_params["max_new_tokens"] - done, room(args, sample, sampling_params))
    if limit < 1:
        if not done:  # else the turn is one that an earlier rollout began
            note_no_room(sample)
        sample.append_response_tokens(args, tokens=[], log_probs=[], finish_reason="length")
        return None
    if getattr(args, "is_stopping", None) is not None and args.is_stopping():
        sample.status = Sample.Status.ABORTED
        return None
    return {
        "input_ids": np.asarray(sample.tokens).tolist(),
        "sampling_params": dict(sampling_params, max_new_tokens=limit),
        "return_logprob": True,
        **({"return_routed_experts": True} if getattr(args, "routed_experts_size", None) else {}),
    }


def _add_routed_experts(args: Any, sample: Sample, answer: Generation) -> None:
    """The experts that the engine chose, with --use-rollout-routing-replay: base64 of int32 [tokens - 1, layers, topk],
    of the request's tokens and the answer's.

    Raises:
        AnswerError: the engine did not say, or spoke of another number of tokens or of other experts.
    """
    if not getattr(args, "routed_experts_size", None) or answer.finish_reason == "abort":
        return  # what is aborted is gone on with, and then the engine tells of all tokens
    size = (len(sample.tokens) - 1, *args.routed_experts_size)
    try:
        sample.rollout_routed_experts = routed_experts(answer.meta_info, size, getattr(args, "num_experts", None))
    except AnswerError as error:
        raise AnswerError(
            f"--use-rollout-routing-replay: sample {sample.index}: {error}; does the engine's SGLang know"
            " --enable-return-routed-experts?"
        ) from error


def _routing(sample: Sample) -> dict[str, str]:
    return {} if sample.session_id is None else {"routing_key": sample.session_id}


def _versions(answer: Generation) -> np.ndarray:
    """[n] int32: the version of the weights that sampled each token."""
    spans = [np.full(count, as_version(version), np.int32) for version, count in answer.weight_versions]
    return np.concatenate([np.zeros(0, np.int32), *spans])


def _decoded(args: Any, tokens: Any, sampling_params: dict[str, Any]) -> str:
    """The text of an answer of several engines: a character may lie across a seam, where each had half of it."""
    skip = sampling_params.get("skip_special_tokens", True)
    return load_tokenizer(args.hf_checkpoint).decode(np.asarray(tokens).tolist(), skip_special_tokens=skip)


def room(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> int:
    """Tokens by which the sample may still grow.

    --rollout-max-context-len bounds all of it; without that flag, the response (the tokens of tools included) is
    bounded by its own limit, so that a sample is never longer than the trainers were told.
    """
    if args.rollout_max_context_len is not None:
        return args.rollout_max_context_len - len(sample.tokens)
    return sampling_params["max_new_tokens"] - sample.response_length


def note_no_room(sample: Sample) -> None:
    """Note in the metadata after how many turns of the model no room was left; the run warns where it was one.

    Turns are counted as stretches of tokens that are trained on: what tools say between them has mask 0.
    """
    sample.metadata = {**(sample.metadata or {}), NO_ROOM_AFTER: _num_turns(sample)}


def _num_turns(sample: Sample) -> int:
    if sample.loss_mask is None:
        return int(sample.response_length > 0)
    mask = np.asarray(sample.loss_mask) != 0
    return int(mask[:1].sum() + (mask[1:] & ~mask[:-1]).sum())


def prompt_tokens(args: Any, sample: Sample) -> np.ndarray:
    """[prompt_length] int32: the ids made when the data was read, or the prompt's text tokenized now."""
    if sample.prompt_tokens is not None:
        return sample.prompt_tokens
    if not isinstance(sample.prompt, str):
        raise ValueError("the prompt is a list of messages: add --apply-chat-template")
    return np.asarray(load_tokenizer(args.hf_checkpoint).encode(sample.prompt, add_special_tokens=False), np.int32)


async def generate_and_rm(args: Any, sample: Sample, params: dict[str, Any], evaluation: bool = False) -> Any:
    """Generate one sample and score it, each by the user's function where there is one."""
    path = sample.generate_function_path or args.custom_generate_function_path
    if not evaluation and sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return sample  # a sibling of one that was aborted in an earlier rollout: it is finished and scored
    async with args.semaphore:
        if path is None:
            result: Any = await generate(args, sample, params)
        else:
            result = await _custom_generate(path, args, sample, params, evaluation)
    if args.rollout_sample_hook_path:
        hooked = [await _hooked(args, s, evaluation) for s in (result if isinstance(result, list) else [result])]
        result = hooked if isinstance(result, list) else hooked[0]
    samples = result if isinstance(result, list) else [result]
    if not args.group_rm:
        lost = (Sample.Status.ABORTED, Sample.Status.FAILED)
        missing = [one for one in samples if one.reward is None and one.status not in lost]
        if missing and isinstance(result, list):
            for one, reward in zip(missing, await batched_async_rm(args, missing), strict=True):
                one.reward = reward
        elif missing:
            missing[0].reward = await async_rm(args, missing[0])
    elif evaluation:  # an evaluation has no groups: the group function sees one sample at a time
        for one in samples:
            one.reward = (await batched_async_rm(args, [one]))[0]
    return result


async def _custom_generate(path: str, args: Any, sample: Sample, params: dict[str, Any], evaluation: bool) -> Any:
    """What the user's generate function made of a sample: one or several, each checked.

    Raises:
        HookError: it raised, or returned what is no sample, or one whose fields do not fit together.
    """
    takes_evaluation = "evaluation" in inspect.signature(load_function(path)).parameters
    keywords = {"evaluation": evaluation} if takes_evaluation else {}
    field, before = "custom_generate_function_path", Before.of(sample)
    urls = [getattr(args, "router_url", None), *(getattr(args, "engine_urls", None) or ())]
    with noting_answers([url for url in urls if url]) as answers:
        result = await awaited_hook(field, path, args, sample, copy.deepcopy(params), **keywords)
    samples = result if isinstance(result, list) else [result]
    made = [one for one in samples if isinstance(one, Sample)]
    fill_versions(made, answers, f"--custom-generate-function-path {path}", before)
    check_samples(field, path, samples, Limits.of_args(args))
    return result


async def _hooked(args: Any, sample: Sample, evaluation: bool) -> Sample:
    """The sample as the functions of --rollout-sample-hook-path leave it."""
    field = "rollout_sample_hook_path"
    for path in args.rollout_sample_hook_path:
        rollout_id = getattr(args, "rollout_id", None)
        found = await awaited_hook(field, path, args, sample, rollout_id=rollout_id, evaluation=evaluation)
        sample = sample if found is None else found
        check_samples(field, path, [sample], Limits.of_args(args))
    return sample


# ------------------------------------------------------------------------------------------------ a rollout
async def generate_group(args: Any, group: list[Sample], params: dict[str, Any]) -> list[Sample]:
    """All samples of one prompt; with --group-rm scored together."""
    makes = [generate_and_rm(args, sample, dict(params)) for sample in group]
    if ESTIMATORS[args.advantage_estimator].needs_greedy_answer and group[0].baseline_reward is None:
        *results, baseline = await asyncio.gather(*makes, _greedy_reward(args, group[0], params))
        for sample in (s for result in results for s in (result if isinstance(result, list) else [result])):
            sample.baseline_reward = baseline
    else:
        results = await asyncio.gather(*makes)
    samples = [s for result in results for s in (result if isinstance(result, list) else [result])]
    if args.group_rm and any(s.reward is None for s in samples):
        for sample, reward in zip(samples, await batched_async_rm(args, samples), strict=True):
            sample.reward = reward
    return samples


async def _greedy_reward(args: Any, sample: Sample, params: dict[str, Any]) -> float | None:
    """The reward of the greedy answer to a sample's prompt, shaped as others are; None where it was aborted."""
    blank = Sample(
        group_index=sample.group_index,
        prompt=copy.deepcopy(sample.prompt),
        label=copy.deepcopy(sample.label),
        metadata=copy.deepcopy(sample.metadata),
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
        prompt_tokens=sample.prompt_tokens,
        messages=copy.deepcopy(sample.messages),
    )
    made = await generate_and_rm(args, blank, dict(params, temperature=0.0, top_p=1.0, top_k=-1))
    answer = made[0] if isinstance(made, list) else made
    if answer.status == Sample.Status.ABORTED:
        return None
    if answer.status == Sample.Status.FAILED and answer.reward is None:
        return args.reward_failure_value  # as a reward function that fails
    if answer.reward is None:
        answer.reward = (await batched_async_rm(args, [answer]))[0]
    shaping = length_reward(answer.response_length, args.rollout_max_response_len, args)
    return answer.get_reward_value(args) + shaping


def apply_filter(args: Any, group: list[Sample]) -> DynamicFilterOutput:
    """Ask the dynamic sampling filter, if there is one, about a finished group; a bare bool is accepted."""
    path = args.dynamic_sampling_filter_path
    if path is None:
        return DynamicFilterOutput(True)
    verdict = call_hook("dynamic_sampling_filter_path", path, args, group)
    if isinstance(verdict, bool | np.bool_):
        return DynamicFilterOutput(bool(verdict))
    if not hasattr(verdict, "keep"):
        said = f"it returned {type(verdict).__name__}; a DynamicFilterOutput or a bool is wanted"
        raise HookError(f"--dynamic-sampling-filter-path {path}: {said}", group)
    fallback = bool(getattr(verdict, "keep_when_insufficient", False))
    return DynamicFilterOutput(bool(verdict.keep), getattr(verdict, "reason", None), fallback)


def _check_filter_keeps(args: Any, num_kept: int, dropped: Counter[str], target: int) -> None:
    """A filter that keeps next to nothing would never fill the rollout.

    Raises:
        ValueError: names the filter, and what it said.
    """
    num_dropped = sum(dropped.values())
    if num_dropped >= MAX_DROPPED * target and num_kept * MAX_DROPPED < num_dropped:
        raise ValueError(
            f"--dynamic-sampling-filter-path {args.dynamic_sampling_filter_path}: it kept {num_kept} of"
            f" {num_kept + num_dropped} groups, {target} are wanted; reasons: {dict(dropped)}"
        )


async def _generate(args: Any, data_source: Any) -> RolloutFnTrainOutput:
    params = sampling_params(args)
    target = args.rollout_batch_size
    batch = args.over_sampling_batch_size or target
    stopping = asyncio.Event()
    args.is_stopping = stopping.is_set
    num_partial = 0
    kept: list[list[Sample]] = []
    kept_blank: list[list[Sample]] = []
    dropped: Counter[str] = Counter()
    pending: dict[asyncio.Task[list[Sample]], list[Sample]] = {}
    async with _client(args), Teacher(args) as teacher:
        try:
            while len(kept) < target:
                if args.abort_event.is_set():
                    raise RolloutAborted("the rollout was aborted")
                while len(kept) + len(pending) < target:
                    for group in data_source.get_samples(batch):
                        blank = copy.deepcopy(group)
                        if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
                            _mask_earlier(group)
                        pending[asyncio.create_task(generate_group(args, group, params))] = blank
                done, _ = await asyncio.wait(pending, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    blank = pending.pop(task)
                    group = task.result()
                    verdict = apply_filter(args, group)
                    if not verdict.keep and not (verdict.keep_when_insufficient and len(kept) + len(pending) < target):
                        dropped[verdict.reason or "filtered"] += 1
                        _check_filter_keeps(args, len(kept), dropped, target)
                    else:
                        kept.append(group)
                        kept_blank.append(blank)
                        teacher.begin(group)
        except RolloutAborted:
            data_source.add_samples(kept_blank)  # the finished groups are not handed out: their prompts come again
            raise
        finally:
            if pending and args.partial_rollout and len(kept) >= target:
                stopping.set()
                num_partial = await _stop_and_keep(args, data_source, pending)
            unfinished = list(pending.values())
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if unfinished:
                data_source.add_samples(unfinished)  # their prompts come first in the next rollout
                await abort_all(args.engine_urls, args.api_key)
        await teacher.finish()
    kept.sort(key=lambda group: group[0].index if group[0].index is not None else 0)
    surplus = kept[target:]
    if surplus:
        dropped["surplus"] += len(surplus)
    metrics: dict[str, float] = {f"rollout/dropped_{reason}": count for reason, count in dropped.items()}
    if args.partial_rollout:
        metrics["rollout/partial_samples"] = num_partial
    metrics |= _retries(args, "rollout")
    return RolloutFnTrainOutput(kept[:target], metrics)


async def _stop_and_keep(args: Any, data_source: Any, pending: dict[asyncio.Task[list[Sample]], list[Sample]]) -> int:
    """--partial-rollout: abort what still runs and hand the groups back with what they have. Number of samples.

    Groups of whom the engines do not let go in time are left in `pending`.
    """
    deadline = asyncio.get_running_loop().time() + ABORT_TIMEOUT_S
    waiting = set(pending)
    while waiting and asyncio.get_running_loop().time() < deadline:
        # Again and again: a request that was on its way to an engine came after the first call.
        await abort_all(args.engine_urls, args.api_key)
        _, waiting = await asyncio.wait(waiting, timeout=0.2)
    count = 0
    for task in [task for task in pending if task.done()]:
        blank = pending.pop(task)
        group = task.result()  # what it raised, a reward function's error say, ends the rollout as at any time
        one_each = len(group) == len(blank)  # of a function that returns several samples for one, none can go on
        data_source.add_samples([group if one_each else blank])
        count += sum(s.status == Sample.Status.ABORTED and s.response_length > 0 for s in group) if one_each else 0
    return count


def _mask_earlier(group: list[Sample]) -> None:
    """Train on nothing that was sampled in an earlier rollout, by older weights."""
    for sample in group:
        if sample.response_length:
            sample.loss_mask = np.zeros(sample.response_length, np.int32)


class _client:
    """Opens the HTTP client and the concurrency limit of one rollout, and puts both on its `args`."""

    def __init__(self, args: Any) -> None:
        self.args = args

    async def __aenter__(self) -> None:
        limit = self.args.sglang_server_concurrency * max(1, len(self.args.engine_urls))
        self.args.semaphore = asyncio.Semaphore(limit)
        self.args.generate_client = GenerateClient(
            self.args.router_url,
            self.args.api_key,
            timeout_s=3600.0,
            max_connections=limit,
            vocab_size=self.args.vocab_size,  # an id beyond it would kill the server that is asked for it
            stream_responses=self.args.stream_responses,
            # The router drops the request for experts.
            worker_urls=self.args.engine_urls if getattr(self.args, "routed_experts_size", None) else (),
            engine_urls=self.args.engine_urls,
        )

    async def __aexit__(self, *exc: object) -> None:
        await self.args.generate_client.close()


# ------------------------------------------------------------------------------------------------ evaluation
@functools.cache
def _eval_prompts(folder: str, path: str, columns: tuple[Any, ...], flag: str) -> list[Sample]:
    input_key, label_key, metadata_key, tool_key, template, kwargs, limit = columns
    made = PromptColumns(input_key, label_key, metadata_key, tool_key, template, json.loads(kwargs), limit)
    return load_prompts(path, load_tokenizer(folder), made, flag).samples


async def _evaluate(args: Any) -> RolloutFnEvalOutput:
    async with _client(args):
        data = {one.name: await _evaluate_set(args, one) for one in eval_sets(args)}
        return RolloutFnEvalOutput(data, _retries(args, "eval"))


def _retries(args: Any, prefix: str) -> dict[str, float]:
    """The answers that were refused, where there were any; with --use-fault-tolerance also what was sent again, and
    what was kept of engines that died."""
    client = args.generate_client
    refused = {f"{prefix}/answers_refused": client.num_answers_refused} if client.num_answers_refused else {}
    if not args.use_fault_tolerance:
        return refused
    kept = {f"{prefix}/requests_retried": client.num_retries, f"{prefix}/tokens_kept": client.num_tokens_kept}
    return kept | refused


async def _evaluate_set(args: Any, one: EvalSet) -> dict[str, Any]:
    """Generate and score all samples of one set; hooks see the set's own reward flags in `args`."""
    own = copy.copy(args)
    own.rm_type, own.custom_rm_path, own.eval_reward_key = one.rm_type, one.custom_rm_path, one.reward_key
    own.custom_generate_function_path = one.custom_generate_function_path
    own.group_rm = args.group_rm and one.custom_rm_path is not None
    params = eval_sampling_params(args, one)
    kwargs = json.dumps(args.apply_chat_template_kwargs, sort_keys=True)
    keys = (one.input_key, one.label_key, one.metadata_key, one.tool_key)
    columns = (*keys, args.apply_chat_template, kwargs, args.rollout_max_prompt_len)
    flag = "--eval-prompt-data" if args.eval_config is None else f"--eval-config {args.eval_config}"
    samples: list[Sample] = []
    for group, prompt in enumerate(_eval_prompts(args.hf_checkpoint, one.path, columns, flag)):
        for _ in range(one.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = group, len(samples)
            sample.metadata.update(copy.deepcopy(one.metadata_overrides))
            samples.append(sample)
    groups = [sample.group_index for sample in samples]
    results = await asyncio.gather(*(generate_and_rm(own, s, dict(params), evaluation=True) for s in samples))
    samples = []
    for index, result in zip(groups, results, strict=True):
        for sample in result if isinstance(result, list) else [result]:
            sample.group_index = index  # also where a user's function made the sample
            samples.append(sample)
    flag = "--eval-reward-key" if args.eval_config is None else f"{flag}: set {one.name}: reward_key"
    return {  # an answer that was never scored is a wrong one
        "rewards": [0.0 if s.reward is None else reward_value(s.reward, one.reward_key, flag) for s in samples],
        "truncated": [s.status == Sample.Status.TRUNCATED for s in samples],
        "samples": samples,
    }
