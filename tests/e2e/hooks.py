"""Hooks of the end-to-end tests: what a user would plug in."""

from __future__ import annotations

from typing import Any


async def partial_credit(args: Any, sample: Any, **kwargs: Any) -> float:
    """1 for the right answer, else up to 0.5 for how many characters are digits."""
    if sample.response.strip() == sample.label:
        return 1.0
    return 0.5 * sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))


async def never(args: Any, sample: Any, **kwargs: Any) -> float:
    """A reward that does not find the answer in this form."""
    return float(sample.response == f"The answer is {sample.label}.")


async def raising(args: Any, sample: Any, **kwargs: Any) -> float:
    """A reward with a bug."""
    raise KeyError("answer")


def slime_style_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A synchronous rollout function with plain lists, as written for slime; rewards are left to the caller."""
    import requests

    from fusionrl.rollout.sglang_rollout import load_tokenizer

    tokenizer = load_tokenizer(args.hf_checkpoint)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            prompt_ids = tokenizer.encode(sample.prompt, add_special_tokens=False)
            answer = requests.post(
                url,
                json={
                    "input_ids": prompt_ids,
                    "sampling_params": {"max_new_tokens": args.rollout_max_response_len, "temperature": 1.0},
                    "return_logprob": True,
                },
                headers={"Authorization": f"Bearer {args.api_key}"},
                timeout=60,
            ).json()
            logprobs = answer["meta_info"]["output_token_logprobs"]
            new_tokens = [item[1] for item in logprobs]
            sample.tokens = prompt_ids + new_tokens
            sample.response_length = len(new_tokens)
            sample.rollout_log_probs = [item[0] for item in logprobs]
            sample.response = answer["text"]
            sample.status = sample.Status.COMPLETED
    return groups


async def two_turns(args: Any, sample: Any, sampling_params: Any) -> Any:
    """The model, a tool's answer, the model again."""
    from fusionrl.rollout.agent import append_text, begin
    from fusionrl.rollout.sglang_rollout import generate_turn

    begin(args, sample)
    half = dict(sampling_params, max_new_tokens=sampling_params["max_new_tokens"] // 2)
    await generate_turn(args, sample, half)
    if append_text(args, sample, sampling_params, "=42 "):
        await generate_turn(args, sample, sampling_params)
    return sample


async def noted_generate(args: Any, sample: Any, sampling_params: Any) -> Any:
    """The default, after a file that says which rollout has begun."""
    from pathlib import Path

    from fusionrl.plugin_api import generate

    Path(args.run_dir, f"began-{args.rollout_id}").touch()
    return await generate(args, sample, sampling_params)
