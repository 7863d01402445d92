"""A task as slime's users write one, with slime's imports: rollout, evaluation, generation with fan-out, reward."""

import asyncio
import copy
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.rm_hub import batched_async_rm
from slime.rollout.sglang_rollout import GenerateState, generate, generate_and_rm_group
from slime.utils.http_utils import post
from slime.utils.types import Sample

STATE: GenerateState | None = None


def rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Train and evaluate by the same function, on an event loop of its own."""
    assert args.rollout_num_gpus and args.hidden_size and args.router_policy and not args.use_wandb
    if evaluation:
        return asyncio.run(evaluate(args))
    groups = data_source.get_samples(args.rollout_batch_size)
    return RolloutFnTrainOutput(samples=asyncio.run(make(args, groups)), metrics={})


async def make(args: Namespace, groups: list[list[Sample]]) -> list[Any]:
    params = GenerateState(args).sampling_params
    return await asyncio.gather(*(generate_and_rm_group(args, group, params.copy()) for group in groups))


async def evaluate(args: Namespace) -> RolloutFnEvalOutput:
    data = {}
    for one in args.eval_datasets:
        sample = Sample(index=0, prompt="7 + 5 =", label="12")
        params = dict(GenerateState(args).sampling_params, temperature=one.temperature)
        sample = await generate(args, sample, params)
        (sample.reward,) = await batched_async_rm(args, [sample])
        data[one.name] = {"rewards": [sample.reward], "truncated": [False], "samples": [sample]}
    return RolloutFnEvalOutput(data=data)


async def two_turns(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """By `post`, with lists throughout: an answer, a tool's word, an answer; and a second sample of the first turn."""
    global STATE
    STATE = STATE or GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = STATE.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.loss_mask, sample.rollout_log_probs = [], []
    short: Sample | None = None
    for turn in range(2):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        entries = output["meta_info"]["output_token_logprobs"]
        sample.tokens += [entry[1] for entry in entries]
        sample.rollout_log_probs += [entry[0] for entry in entries]
        sample.loss_mask += [1] * len(entries)
        sample.response += output["text"]
        sample.weight_versions.append(output["meta_info"]["weight_version"])
        if turn == 0:
            sample.response_length = len(sample.loss_mask)
            short = copy.deepcopy(sample)
            said = STATE.tokenizer(" go on:", add_special_tokens=False)["input_ids"]
            sample.tokens = sample.tokens + said
            sample.loss_mask = sample.loss_mask + [0] * len(said)
            sample.rollout_log_probs = sample.rollout_log_probs + [0.0] * len(said)
    assert short is not None
    sample.response_length = len(sample.loss_mask)
    sample.status = short.status = Sample.Status.COMPLETED
    return [short, sample]


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Share of digits, made in a reward process."""
    assert isinstance(sample.tokens, list)
    return sum(char.isdigit() for char in sample.response) / max(1, len(sample.response))


async def branches(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Takes messages as they are, and makes one to three samples of a prompt."""
    assert isinstance(sample.prompt, list) and not sample.tokens
    text = sample.prompt[0]["content"]
    ids = GenerateState(args).tokenizer(text, add_special_tokens=False)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    made = []
    for number in range(1 + sample.index % 3):
        one = copy.deepcopy(sample)
        output = await post(url, payload)
        entries = output["meta_info"]["output_token_logprobs"]
        one.tokens = list(ids)
        one.append_response_tokens(
            args,
            tokens=[entry[1] for entry in entries],
            log_probs=[entry[0] for entry in entries],
            trainable=True,
            meta_info=output["meta_info"],
        )
        one.response, one.status = output["text"], Sample.Status.COMPLETED
        one.metadata = {"branch": number, "of": sample.index}
        made.append(one)
    return made
