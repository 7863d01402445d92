"""Names of `slime.rollout.rm_hub` and `on_policy_distillation` that `fusionrl.rewards` does not have."""

from argparse import Namespace
from typing import Any

import numpy as np

from fusionrl.data.sample import Sample
from fusionrl.rewards import math_utils


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{…}` or `\fbox{…}` of a text, box included; None if there is none that is closed."""
    start = max(string.rfind("\\boxed"), string.rfind("\\fbox"))
    depth = 0
    for position in range(start, len(string)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(string[position], 0)
        if string[position] == "}" and depth == 0:
            return string[start : position + 1]
    return None


def remove_boxed(s: str) -> str | None:
    r"""Return the content of `\boxed{…}`; None unless the text is exactly such a box."""
    is_box = s is not None and s.startswith("\\boxed{") and s.endswith("}")
    return s[len("\\boxed{") : -1] if is_box else None


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal, symbolically too (`fusionrl.rewards.math_utils.is_equal_answer`)."""
    return math_utils.is_equal_answer(str(given_answer), str(ground_truth))


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal after both are written in one spelling."""
    return math_utils.normalize_answer(str(given_answer)) == math_utils.normalize_answer(str(ground_truth))


async def reward_func(args: Namespace, sample: Sample, **kwargs: object) -> dict[str, Any]:
    """Let the server at --rm-url read the sample's tokens; returns its answer, with the log-prob of each token."""
    from fusionrl.rollout.engine_post import post  # with aiohttp, which graders do not need

    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": args.rollout_temperature, "max_new_tokens": 0, "skip_special_tokens": False},
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
