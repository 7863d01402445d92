"""Evaluation by the engines: the samples of every set, generated and scored."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from argparse import Namespace

from fusionrl.config.eval_sets import EvalSet, eval_sets
from fusionrl.data.prompts import PromptColumns, load_prompts
from fusionrl.data.sample import Sample, reward_value
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.client import RolloutClient
from fusionrl.rollout.generate import SampleContext, as_list, generate_and_score
from fusionrl.rollout.model_turn import SamplingParams
from fusionrl.rollout.types import EvalResult, RolloutFnEvalOutput


async def evaluate_sets(args: Namespace, params: SamplingParams) -> RolloutFnEvalOutput:
    """Evaluate every set of --eval-prompt-data or --eval-config.

    params  the sampling parameters of a rollout, over which a set's own go
    """
    async with RolloutClient(args) as client:
        data = {one.name: await _evaluate_set(args, params, one) for one in eval_sets(args)}
        return RolloutFnEvalOutput(data, client.retries("eval"))


def eval_sampling_params(params: SamplingParams, one: EvalSet) -> SamplingParams:
    """The sampling parameters of a rollout with the settings of an evaluation set."""
    params = params | {
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


async def _evaluate_set(args: Namespace, params: SamplingParams, one: EvalSet) -> EvalResult:
    """Generate and score all samples of one set; hooks see the set's own reward flags in `args`."""
    own = copy.copy(args)
    own.rm_type, own.custom_rm_path, own.eval_reward_key = one.rm_type, one.custom_rm_path, one.reward_key
    own.custom_generate_function_path = one.custom_generate_function_path
    own.group_rm = args.group_rm and one.custom_rm_path is not None
    context, params = SampleContext.of_args(own), eval_sampling_params(params, one)
    flag = "--eval-prompt-data" if args.eval_config is None else f"--eval-config {args.eval_config}"
    samples = _samples_of(_prompts_of(args, one, flag), one)
    groups = [sample.group_index for sample in samples]
    results = await asyncio.gather(*(generate_and_score(context, s, dict(params), evaluation=True) for s in samples))
    samples = []
    for index, result in zip(groups, results, strict=True):
        for sample in as_list(result):
            sample.group_index = index  # also where a user's function made the sample
            samples.append(sample)
    flag = "--eval-reward-key" if args.eval_config is None else f"{flag}: set {one.name}: reward_key"
    return {  # an answer that was never scored is a wrong one
        "rewards": [0.0 if s.reward is None else reward_value(s.reward, one.reward_key, flag) for s in samples],
        "truncated": [s.status == Sample.Status.TRUNCATED for s in samples],
        "samples": samples,
    }


def _prompts_of(args: Namespace, one: EvalSet, flag: str) -> list[Sample]:
    kwargs = json.dumps(args.apply_chat_template_kwargs, sort_keys=True)
    keys = (one.input_key, one.label_key, one.metadata_key, one.tool_key)
    keeps_messages = one.custom_generate_function_path is not None
    columns = (*keys, args.apply_chat_template, kwargs, args.rollout_max_prompt_len, keeps_messages)
    return _read_prompts(args.hf_checkpoint, one.path, columns, flag)


# Fields of PromptColumns, in their order; the template's arguments as JSON, so that it can be hashed.
_Columns = tuple[str, str | None, str, str | None, bool, str, int | None, bool]


@functools.cache
def _read_prompts(folder: str, path: str, columns: _Columns, flag: str) -> list[Sample]:
    input_key, label_key, metadata_key, tool_key, template, kwargs, limit, keeps = columns
    made = PromptColumns(input_key, label_key, metadata_key, tool_key, template, json.loads(kwargs), limit, keeps)
    return load_prompts(path, load_tokenizer(folder), made, flag).samples


def _samples_of(prompts: list[Sample], one: EvalSet) -> list[Sample]:
    """The set's samples, several of a prompt side by side."""
    samples: list[Sample] = []
    for group, prompt in enumerate(prompts):
        for _ in range(one.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = group, len(samples)
            sample.metadata.update(copy.deepcopy(one.metadata_overrides))
            samples.append(sample)
    return samples
