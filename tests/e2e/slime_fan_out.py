"""A generate function in slime's style that takes messages as they are and makes one to three samples of a prompt."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def branches(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
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
