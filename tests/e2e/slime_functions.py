"""Functions as slime's users write them; only the line of the import differs."""

import copy
from typing import Any

from fusionrl.plugin_api import GenerateState, Sample, post


async def two_answers(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Assigns tokens and masks by hand, sets and deep-copies `args`, and makes two samples of one prompt."""
    args.my_own_setting = "mine"
    assert copy.deepcopy(args).my_own_setting == "mine"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    made = []
    for number in range(2):
        payload = {"input_ids": prompt_ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        logprobs = output["meta_info"]["output_token_logprobs"]
        one = copy.deepcopy(sample)
        one.tokens = prompt_ids + [item[1] for item in logprobs]
        one.response_length = len(logprobs)
        one.rollout_log_probs = [item[0] for item in logprobs]
        one.loss_mask = [1] * len(logprobs)
        one.loss_mask[0] = number  # the first sample does not train on its first token
        one.response = output["text"]
        one.my_note = {"number": number, "setting": args.my_own_setting}  # type: ignore[attr-defined]
        match output["meta_info"]["finish_reason"]["type"]:
            case "length":
                one.status = Sample.Status.TRUNCATED
            case "abort":
                one.status = Sample.Status.ABORTED
            case _:
                one.status = Sample.Status.COMPLETED
        made.append(one)
    return made


async def reward(args: Any, samples: list[Sample], **kwargs: Any) -> list[dict[str, float]]:
    """Gets all samples of one prompt, as slime hands them over; reads an attribute that the generate function added."""
    assert [sample.my_note["number"] for sample in samples] == [0, 1]  # type: ignore[attr-defined]
    found = []
    for sample in samples:
        digits = sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))
        found.append({"digits": digits, "number": float(sample.my_note["number"])})  # type: ignore[attr-defined]
    return found
