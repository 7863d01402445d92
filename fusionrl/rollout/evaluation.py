"""Evaluation by the engines: the samples of every set, generated and scored."""

import asyncio
import copy
from argparse import Namespace

from fusionrl.config.eval_sets import EvalSet, eval_sets
from fusionrl.data.prompts import PromptColumns, load_prompts
from fusionrl.data.sample import Sample, reward_value
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.rollout.generate import SampleContext, as_list, generate_and_score
from fusionrl.rollout.generate_state import RolloutClient, sampling_params
from fusionrl.rollout.model_turn import SamplingParams
from fusionrl.rollout.types import EvalResult, RolloutFnEvalOutput

_prompts: dict[str, list[Sample]] = {}  # by everything that decides how the prompts of a set are read


async def evaluate_sets(args: Namespace) -> RolloutFnEvalOutput:
    """Evaluate every set of --eval-prompt-data or --eval-config."""
    async with RolloutClient(args) as client:
        data = {eval_set.name: await _evaluate_set(args, eval_set) for eval_set in eval_sets(args)}
        return RolloutFnEvalOutput(data, client.retries("eval"))


def eval_sampling_params(params: SamplingParams, eval_set: EvalSet) -> SamplingParams:
    """The sampling parameters of a rollout with the settings of an evaluation set."""
    params = params | {
        "temperature": eval_set.temperature,
        "top_p": eval_set.top_p,
        "top_k": eval_set.top_k,
        "max_new_tokens": eval_set.max_response_len,
        "min_new_tokens": eval_set.min_new_tokens,
    }
    for name in ("stop", "stop_token_ids", "repetition_penalty"):
        params.pop(name, None)
        if value := getattr(eval_set, name):
            params[name] = value
    return params


async def _evaluate_set(args: Namespace, eval_set: EvalSet) -> EvalResult:
    """Generate and score all samples of one set; hooks see the set's own reward flags in `args`."""
    set_args = copy.copy(args)
    set_args.rm_type, set_args.custom_rm_path = eval_set.rm_type, eval_set.custom_rm_path
    set_args.eval_reward_key = eval_set.reward_key
    set_args.custom_generate_function_path = eval_set.custom_generate_function_path
    set_args.group_rm = args.group_rm and eval_set.custom_rm_path is not None
    context, params = SampleContext.of_args(set_args), eval_sampling_params(sampling_params(args), eval_set)
    flag = "--eval-prompt-data" if args.eval_config is None else f"--eval-config {args.eval_config}"
    samples = _samples_of(_prompts_of(args, eval_set, flag), eval_set)
    groups = [sample.group_index for sample in samples]
    results = await asyncio.gather(*(generate_and_score(context, s, dict(params), evaluation=True) for s in samples))
    samples = []
    for index, result in zip(groups, results, strict=True):
        for sample in as_list(result):
            sample.group_index = index  # also where a user's function made the sample
            samples.append(sample)
    flag = "--eval-reward-key" if args.eval_config is None else f"{flag}: set {eval_set.name}: reward_key"
    return {  # an answer that was never scored is a wrong one
        "rewards": [0.0 if s.reward is None else reward_value(s.reward, eval_set.reward_key, flag) for s in samples],
        "truncated": [s.status == Sample.Status.TRUNCATED for s in samples],
        "samples": samples,
    }


def _prompts_of(args: Namespace, eval_set: EvalSet, flag: str) -> list[Sample]:
    has_own = eval_set.custom_generate_function_path is not None
    columns = PromptColumns.of(args, has_own).of_set(eval_set, has_own)
    key = repr((args.hf_checkpoint, eval_set.path, columns))
    if key not in _prompts:
        _prompts[key] = load_prompts(eval_set.path, load_tokenizer(args.hf_checkpoint), columns, flag).samples
    return _prompts[key]


def _samples_of(prompts: list[Sample], eval_set: EvalSet) -> list[Sample]:
    samples: list[Sample] = []
    for group, prompt in enumerate(prompts):
        for _ in range(eval_set.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = group, len(samples)
            sample.metadata.update(copy.deepcopy(eval_set.metadata_overrides))
            samples.append(sample)
    return samples
