"""Whole runs that train adapters: pushed to engines that do not stop, also where one dies, and out of PEFT folders."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from fusionrl.observe.rollouts import list_rollouts
from tests.e2e.launch import launch, metrics_of, run, train_steps, trained_prompts
from tools.rescoring import checkpoint_versions, rescore, saved_samples

pytestmark = pytest.mark.e2e
NUM_STEPS = 4
BOUND = 2
LORA = ["--lora-rank", "2", "--lora-alpha", "8"]
# Answers that take the engines longer than a step takes the trainer: some are under way at each push.
LONG_ANSWERS = ["--rollout-max-response-len", "72", "--admission-lead", "2", "--sglang-max-running-requests", "4"]


def test_answers_finish_under_the_version_that_they_began_with(rl_flags: list[str], task: Path, tmp_path: Path) -> None:
    """With answers under way at pushes, and an engine that dies and comes back; each token is its version's."""
    folder = tmp_path / "run"
    flags = [*rl_flags, *LORA, *LONG_ANSWERS, "--pipeline", "async-partial", "--run-dir", str(folder)]
    flags += ["--num-rollout", str(NUM_STEPS), "--save-interval", "1", "--verify-weights", "always"]
    flags += ["--rollout-num-gpus", "2", "--use-fault-tolerance", "--rollout-health-check-interval", "2"]
    with launch(flags, tmp_path) as launched:
        launched.wait_for(lambda: len(train_steps(folder)) >= 1)
        (server,) = launched.find(r"^\S+ -m fusionrl\.engines\.launch_server .*--random-seed 43 ")
        os.kill(server, signal.SIGKILL)
        assert launched.wait() == 0, launched.output()[-3000:]
    assert "engine 1 is dead" in launched.output()
    first, *rows = metrics_of(folder)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert row["sync/version"] == row["step"] and row["sync/verify_logprob_diff"] < 1e-5
        if not row["sync/engines_restarted"]:  # which get the weights, too
            assert row["sync/pause_s"] == 0 and row["sync/bytes"] < 0.05 * first["sync/bytes"]
    assert sum(row["sync/engines_restarted"] for row in rows) == 1
    ages = [row["rollout/staleness/token_max"] for row in rows]
    assert 1 <= max(ages) <= BOUND
    prompts = trained_prompts(folder)
    assert len(prompts) == len(set(prompts)) == 8 * NUM_STEPS
    samples, versions = saved_samples(folder), checkpoint_versions(folder, task / "model")
    found = rescore(samples, versions, max_staleness=BOUND)
    assert found.told() == [] and found.samples == len(samples) == 32 * NUM_STEPS and found.stale_tokens > 0
    # Only answers that the dead engine left unfinished continue under another version.
    assert found.spanning <= 8


def test_rl_continues_with_the_adapter_of_an_sft(rl_flags: list[str], task: Path, tmp_path: Path) -> None:
    """From a PEFT folder and into one; with an evaluation, two ranks an engine, and base weights by files.

    Engines that load the folder evaluate it as the run did.
    """
    sft = ["--mode", "sft", "--device", "cpu", "--lr", "1e-2", "--input-key", "messages", "--no-save", *LORA]
    run(
        [*sft, "--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "sft.jsonl"), "--rollout-shuffle"]
        + ["--num-rollout", "10", "--rollout-batch-size", "64", "--run-dir", str(tmp_path / "sft")]
        + ["--save-hf", str(tmp_path / "adapter")],
        tmp_path,
    )
    losses = [row["train/loss"] for row in metrics_of(tmp_path / "sft") if "train/loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    flags = [*rl_flags, "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--eval-temperature", "0"]
    flags += ["--eval-prompt-data", "sums", str(task / "eval.jsonl"), "--eval-input-key", "prompt", *LORA]
    flags += ["--eval-label-key", "label"]
    run(
        [*flags, "--lora-adapter-path", str(tmp_path / "adapter"), "--num-rollout", "2", "--no-save"]
        + ["--eval-interval", "2", "--update-weight-transport", "disk", "--verify-weights", "always"]
        + ["--run-dir", str(tmp_path / "rl"), "--save-hf", str(tmp_path / "trained")],
        tmp_path,
    )
    rows = metrics_of(tmp_path / "rl")
    assert all(row["sync/verify_logprob_diff"] < 1e-5 for row in rows if "sync/version" in row)
    assert all(row["train/logprob_diff_max"] < 1e-4 for row in rows if "train/loss" in row)
    assert [row["step"] for row in rows if "eval/sums/reward" in row] == [0, 2]
    config = json.loads((tmp_path / "trained" / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["lora_alpha"] == 8
    served = ["--mode", "eval", "--lora-adapter-path", str(tmp_path / "trained"), "--run-dir", str(tmp_path / "eval")]
    run([*flags, *served], tmp_path)
    found, trained = (_answers(tmp_path / folder, step) for folder, step in (("eval", 0), ("rl", 2)))
    assert found == trained != _answers(tmp_path / "rl", 0)


def _answers(folder: Path, step: int) -> list[str]:
    (file,) = (one for one in list_rollouts(folder) if one.kind == "eval-sums" and one.step == step)
    return [row["response"] for row in file.rows()]
