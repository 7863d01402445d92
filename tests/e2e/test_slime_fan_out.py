"""Idioms of slime's examples in one run: the fully asynchronous worker, messages, fan-out, a teacher of the user's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from fusionrl.compat.slime.api.http import run_app_in_thread
from tests.e2e.launch import metrics_of, run, samples_of_step

pytestmark = pytest.mark.e2e

DISTILLATION = "slime.rollout.on_policy_distillation"
TEACHER = -0.5  # its log-prob of any token


async def teacher(request: web.Request) -> web.Response:
    """Answer as an SGLang server that reads tokens."""
    ids = (await request.json())["input_ids"]
    entries = [[TEACHER if position else None, token, None] for position, token in enumerate(ids)]
    return web.json_response({"text": "", "meta_info": {"input_token_logprobs": entries}})


def test_a_fully_asynchronous_run_with_a_teacher_of_its_own(task: Path, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "label": str(2 * i)} for i in range(9)]
    data, folder = tmp_path / "prompts.jsonl", tmp_path / "run"
    data.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    app = web.Application()
    app.router.add_post("/generate", teacher)
    handle = run_app_in_thread(app, host="127.0.0.1")
    flags = ["--mode", "rl", "--device", "cpu", "--hf-checkpoint", str(task / "model"), "--lr", "1e-3", "--no-save"]
    flags += ["--prompt-data", str(data), "--input-key", "prompt", "--label-key", "label", "--num-rollout", "2"]
    flags += ["--rollout-batch-size", "3", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "6"]
    flags += ["--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"]
    flags += ["--custom-generate-function-path", "tests/e2e/slime_fan_out.py:branches"]
    flags += ["--use-opd", "--rm-url", f"http://127.0.0.1:{handle.port}/generate", "--sglang-server-concurrency", "8"]
    flags += ["--custom-rm-path", f"{DISTILLATION}.reward_func"]
    flags += ["--custom-reward-post-process-path", f"{DISTILLATION}.post_process_rewards"]
    try:
        run([*flags, "--num-steps-per-rollout", "1", "--run-dir", str(folder)], tmp_path)
    finally:
        handle.stop()
    trained = [row for row in metrics_of(folder) if "train/loss" in row]
    assert len(trained) == 2
    for row in trained:
        assert row["train/grad_norm"] > 0 and row["train/opd_excluded"] == 0
        samples = samples_of_step(folder, row["step"])
        assert row["train/num_samples"] == 3 * 2 < len(samples), "attempts are counted"
        assert Counter(s["metadata"]["of"] for s in samples) == {
            index: 1 + index % 3 for index in {s["metadata"]["of"] for s in samples}
        }
        assert len({s["metadata"]["of"] for s in samples}) == 3 * 2, "three prompts, of two samples that branch each"
        assert all(s["teacher_log_probs"] == [TEACHER] * s["response_length"] for s in samples)
        assert all(s["weight_versions"] is not None for s in samples)
    first = samples_of_step(folder, 1)
    student = [value for sample in first for value in sample["rollout_log_probs"]]
    gap = sum(value - TEACHER for value in student) / len(student)
    assert trained[0]["train/opd_kl"] == pytest.approx(gap, abs=1e-3)
