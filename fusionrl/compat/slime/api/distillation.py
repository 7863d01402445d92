"""Names of `slime.rollout.on_policy_distillation`: a teacher behind --rm-url scores the tokens."""

from argparse import Namespace
from typing import Any

import numpy as np

from fusionrl.data.sample import Sample
from fusionrl.rollout.engine_post import post


async def reward_func(args: Namespace, sample: Sample, **kwargs: object) -> dict[str, Any]:
    """Let the server at --rm-url read the sample's tokens; returns its answer, with the log-prob of each token."""
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer: dict[str, Any] = await post(args.rm_url, payload)
    return answer


def post_process_rewards(args: Namespace, samples: list[Sample], **kwargs: object) -> tuple[list[float], list[float]]:
    """Keep the teacher's log-probs of each response in `teacher_log_probs`; the rewards themselves are 0."""
    for sample in samples:
        assert isinstance(sample.reward, dict), "the reward is the teacher's answer, of reward_func"
        entries = sample.reward["meta_info"]["input_token_logprobs"][1:]  # before the first token stands nothing
        log_probs = np.array([entry[0] for entry in entries], np.float32)
        sample.teacher_log_probs = log_probs[len(log_probs) - sample.response_length :]
    return [0.0] * len(samples), [0.0] * len(samples)
