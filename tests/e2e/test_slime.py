"""Functions, whole tasks and launch scripts written for slime. A client by its own requests: test_security.py."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fusionrl.compat.slime.api.http import run_app_in_thread
from tests.e2e.launch import metrics_of, printed_by, run, samples_of_step
from tools.family_loops import make_model

pytestmark = pytest.mark.e2e


def test_generate_and_reward_functions_written_for_slime(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Several samples for one prompt, masks by hand, new attributes: all of it reaches the trainers.

    The model is gpt_oss, whose attention has sinks: every push is confirmed.
    """
    folder = tmp_path / "run"
    functions = "tests/e2e/slime_functions.py"
    make_model("gpt_oss", task, tmp_path / "model")
    flags = [*rl_flags, "--hf-checkpoint", str(tmp_path / "model"), "--verify-weights", "always"]
    flags += ["--custom-generate-function-path", f"{functions}:two_answers"]
    flags += ["--custom-rm-path", f"{functions}:reward", "--reward-key", "digits", "--num-rollout", "2", "--no-save"]
    run([*flags, "--num-steps-per-rollout", "2", "--run-dir", str(folder)], tmp_path)
    rows = confirmed_rows(folder)
    for rollout_id, row in enumerate(rows):
        samples = samples_of_step(folder, rollout_id + 1)
        assert len(samples) == 8 * 4 * 2
        assert row["train/num_samples"] == 8 * 4, "two samples of one attempt are one"
        attempts = [samples[i : i + 2] for i in range(0, len(samples), 2)]
        assert row["train/masked_samples"] == sum(not any(map(any, (s["loss_mask"] for s in a))) for a in attempts)
        assert all(s["my_note"] == {"number": i % 2, "setting": "mine"} for i, s in enumerate(samples))
        assert all(s["loss_mask"][0] == s["my_note"]["number"] == s["reward"]["number"] for s in samples)
        assert all(s["weight_versions"] == [rollout_id] * s["response_length"] for s in samples), "post notes them"
    trained = sum(sum(s["loss_mask"]) for rollout_id in range(2) for s in samples_of_step(folder, rollout_id + 1))
    assert sum(row["train/num_tokens"] for row in rows) == trained
    assert "my_own_setting" not in (folder / "config.json").read_text()


def confirmed_rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of two steps; engines have the trainers' log-probs after each push."""
    rows = metrics_of(folder)
    assert [row["step"] for row in rows if "sync/version" in row] == [0, 1, 2]
    assert all(row["sync/verify_logprob_diff"] < 1e-5 for row in rows if "sync/version" in row)
    rows = [row for row in rows if "train/loss" in row]
    assert all(row["train/logprob_diff_max"] < 1e-4 and row["train/grad_norm"] > 0 for row in rows)
    return rows


SLIME_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"


def test_a_task_of_slime_s_runs_with_its_own_imports(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Rollout, evaluation, generation with fan-out and reward, all of a file that imports `slime`.

    The model is deepseek_v3, with latent attention and YaRN: what SGLang computes of its weights when it loads them,
    only log-probs confirm.
    """
    folder, file = tmp_path / "run", "tests/e2e/slime_unchanged.py"
    make_model("deepseek_v3", task, tmp_path / "model")
    eval_rows = tmp_path / "eval.jsonl"
    eval_rows.write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    flags = [*rl_flags, "--hf-checkpoint", str(tmp_path / "model"), "--verify-weights", "always"]
    flags += ["--custom-generate-function-path", f"{file}:two_turns", "--custom-rm-path", f"{file}:reward"]
    flags += ["--rollout-function-path", f"{file}:rollout", "--num-rollout", "2", "--no-save"]
    flags += ["--eval-prompt-data", "mine", str(eval_rows), "--eval-interval", "1", "--eval-input-key", "prompt"]
    flags += ["--num-steps-per-rollout", "1", "--run-dir", str(folder)]
    run([*flags, "--dynamic-sampling-filter-path", SLIME_FILTER], tmp_path)
    confirmed_rows(folder)
    for rollout_id in range(2):
        samples = samples_of_step(folder, rollout_id + 1)
        assert len(samples) == 8 * 4 * 2
        assert all(len(s["loss_mask"]) == s["response_length"] == len(s["weight_versions"]) for s in samples)
        assert all(version == rollout_id for s in samples for version in s["weight_versions"])
    assert sum(any(name.startswith("eval/mine") for name in row) for row in metrics_of(folder)) >= 2


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
    flags += ["--custom-generate-function-path", "tests/e2e/slime_unchanged.py:branches"]
    flags += ["--use-opd", "--rm-url", f"http://127.0.0.1:{handle.port}/generate", "--sglang-server-concurrency", "8"]
    flags += ["--custom-rm-path", f"{DISTILLATION}.reward_func"]
    flags += ["--custom-reward-post-process-path", f"{DISTILLATION}.post_process_rewards"]
    try:
        run([*flags, "--num-steps-per-rollout", "1", "--run-dir", str(folder), "--in-process"], tmp_path)
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


SCRIPT = """\
SCRIPT_DIR="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"
MODEL_ARGS=(
   --swiglu --num-layers {layers} --hidden-size {hidden} --normalization "RMSNorm" --qk-layernorm
)
CKPT_ARGS=(
   --hf-checkpoint {task}/model
   --save ${{SCRIPT_DIR}}/out   # and go on there
   --load ${{SCRIPT_DIR}}/out
)
ROLLOUT_ARGS=(
   --prompt-data {task}/train.jsonl --input-key prompt --label-key label --apply-chat-template
   --rm-type exact --num-rollout 1 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 4
   --global-batch-size 8
)
OPTIMIZER_ARGS=(
   --optimizer adam --lr 1e-4 --lr-decay-style constant --lr-warmup-fraction 0.5
   --accumulate-allreduce-grads-in-fp32 --attention-backend flash
)
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 1 \\
   --colocate ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}} ${{ROLLOUT_ARGS[@]}} \\
   ${{OPTIMIZER_ARGS[@]}}
"""


# A program as `tests.warm_start` runs the command line: its processes are forks of the session's nursery.
WARM = """\
import runpy, sys
sys.path.insert(0, "{root}")
from fusionrl.runtime import early_start
from tests.warm_start import WarmStart
early_start.EarlyStart = WarmStart
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def steps_of(run_dir: Path) -> list[float]:
    """Trained samples of each step."""
    return [row["train/num_samples"] for row in metrics_of(run_dir) if "train/num_samples" in row]


def test_a_script_runs_and_the_shim_goes_on(task: Path, tmp_path: Path) -> None:
    shape = json.loads((task / "model" / "config.json").read_text())
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(task=task, layers=shape["num_hidden_layers"], hidden=shape["hidden_size"]))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = printed_by("from-slime", script, "--shim", tmp_path / "shim")
    command = printed.replace("fusionrl train", f"{sys.executable} -m tests.warm_start train --device cpu")
    first = subprocess.run(["bash", "-e"], input=command, capture_output=True, text=True, env=env, timeout=240)
    assert first.returncode == 0, first.stderr[-3000:]
    assert steps_of(tmp_path / "out") == [8]

    # The same script on a machine where `train.py` is the shim's; its folder has a run, so it goes on.
    (tmp_path / "warm.py").write_text(WARM.format(root=Path(__file__).parents[2]))
    text = script.read_text().replace(
        "ray job submit -- python3 train.py", f"{sys.executable} warm.py shim/train.py --device cpu"
    )
    script.write_text(text.replace("--num-rollout 1", "--num-rollout 2"))
    again = subprocess.run(["bash", "run.sh"], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=240)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "slime's defaults: --no-calculate-per-token-loss" in again.stderr
    assert steps_of(tmp_path / "out") == [8, 8]
