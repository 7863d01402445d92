"""Trainers score each token at the temperature at which it was sampled, also where a user's function changes it."""

from pathlib import Path

import pytest

from fusionrl.observe.rollouts import read_rollouts
from tests.e2e.launch import metrics_of, run

pytestmark = pytest.mark.e2e

HOOKS = """
import aiohttp
from fusionrl.plugin_api import post
from fusionrl.rollout import sglang_rollout
from fusionrl.rollout.agent import append_text, begin


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if not evaluation and rollout_id < 10:
        args.rollout_temperature = 1.6
    return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation)


async def generate(args, sample, sampling_params):
    own = (sglang_rollout.generate, in_turns, by_hand)[sample.index % 3]
    return await own(args, sample, sampling_params)


async def in_turns(args, sample, sampling_params):
    begin(args, sample)
    for temperature in (0.6, 1.7):  # the tool says something after each
        params = dict(sampling_params, temperature=temperature, max_new_tokens=3, ignore_eos=True)
        await sglang_rollout.generate_turn(args, sample, params)
        append_text(args, sample, sampling_params, " and ")
    return sample


async def by_hand(args, sample, sampling_params):
    prompt = sample.prompt_tokens.tolist()
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    params = dict(sampling_params, temperature=1.8)
    answer = await post(url, {"input_ids": prompt, "sampling_params": params, "return_logprob": True})
    async with aiohttp.ClientSession() as client, client.post(url, json={"input_ids": prompt}) as response:
        response.raise_for_status()  # a client that knows of no keys
    entries = answer["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt + [entry[1] for entry in entries]
    sample.response_length, sample.response = len(entries), answer["text"]
    sample.rollout_log_probs = [entry[0] for entry in entries]
    sample.status = sample.Status.COMPLETED
    return sample
"""


def test_the_mismatch_is_that_of_rounding(rl_flags: list[str], tmp_path: Path) -> None:
    """Three functions: the product's own, one with two turns at two temperatures, one that sends its own request.

    The router asks for no key, so that one without is let in.
    """
    hooks, folder = tmp_path / "mine.py", tmp_path / "run"
    hooks.write_text(HOOKS)
    own = ["--rollout-function-path", f"{hooks}:generate_rollout", "--rollout-max-context-len", "60"]
    own += ["--custom-generate-function-path", f"{hooks}:generate", "--num-rollout", "1", "--no-save", "--in-process"]
    own += ["--router-api-key", "none"]
    run([*rl_flags, *own, "--run-dir", str(folder)], tmp_path)
    (step,) = [row for row in metrics_of(folder) if "train/logprob_diff_max" in row]
    assert 0 < step["train/logprob_diff_max"] < 1e-4
    rows = read_rollouts(folder, "train")
    assert {row["index"] % 3 for row in rows if row["response_length"] and not row["remove_sample"]} == {0, 1, 2}
