"""A run that an error ends saves its trained steps first, and its resume is exact.

A reward that raises: test_console.py. An engine that dies: test_end_of_run.py.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import metrics_of, run, train_steps, trained_prompts

pytestmark = pytest.mark.e2e

NUMBERS = ("train/loss", "train/grad_norm", "train/entropy", "rollout/num_tokens")
HOOK = """
import os
def before(args, rollout_id, step_id, *_):
    if os.environ.get("FAILS_AT") == f"{rollout_id} {step_id}":
        raise KeyError("no such column")
"""


def numbers(folder: Path) -> dict[tuple[int, int], list[Any]]:
    """(attempt, step) → numbers of training."""
    rows = [row for row in metrics_of(folder) if "train/loss" in row]
    return {(row["attempt"], row["step"]): [row.get(name) for name in NUMBERS] for row in rows}


def test_a_hook_that_raises_in_the_trainers(task: Path, tmp_path: Path) -> None:
    """Two ranks, two optimizer steps a rollout: before the first of the third one, and in the middle of the last."""
    hook, folder = tmp_path / "hook.py", tmp_path / "a run"
    hook.write_text(HOOK)
    flags = ["--mode", "sft", "--device", "cpu", "--hf-checkpoint", str(task / "model"), "--input-key", "messages"]
    flags += ["--prompt-data", str(task / "sft.jsonl"), "--rollout-batch-size", "8", "--rollout-shuffle"]
    flags += ["--custom-megatron-before-train-step-hook-path", f"{hook}:before", "--num-steps-per-rollout", "2"]
    flags += ["--actor-num-gpus-per-node", "2", "--num-rollout", "4", "--verify-checkpoints", "--lr", "1e-3"]
    run([*flags, "--run-dir", str(tmp_path / "whole")], tmp_path)

    failed = run([*flags, "--run-dir", str(folder)], tmp_path, code=1, FAILS_AT="2 0").output()
    text = " ".join(failed.split())
    assert "failed: HookError: --custom-megatron-before-train-step-hook-path" in text and "no such column" in text
    assert "the run ended after step 2; step_000002 has all of it: --resume continues from there" in text
    command = re.search(r"to continue: fusionrl train (.*--resume)$", failed, re.MULTILINE)
    assert command is not None
    amid = " ".join(run(shlex.split(command[1]), tmp_path, code=1, FAILS_AT="3 1").output().split())
    assert "the trained steps could not be saved: the error interrupted the training of step 4" in amid
    assert "the run ended after step 3; step 3 is lost: --resume continues from step_000002" in amid
    run(shlex.split(command[1]), tmp_path)
    found, whole = numbers(folder), numbers(tmp_path / "whole")
    assert list(found) == [(1, 1), (1, 2), (2, 3), (3, 3), (3, 4)]
    assert {step: found[attempt, step] for attempt, step in found} == {step: whole[1, step] for _, step in whole}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000002", "step_000004"]


def test_a_reward_that_raises_while_groups_are_under_way(rl_flags: list[str], tmp_path: Path) -> None:
    """Generation runs ahead: no prompt is lost, and none is trained twice.

    Of 32 samples a step, those from 96 on are admitted after the first push, and the last step needs them.
    """
    folder = tmp_path / "run"
    flags = [*rl_flags, "--pipeline", "async-partial", "--custom-rm-path", "tests/e2e/hooks.py:fails_late"]
    flags += ["--rollout-max-response-len", "48", "--admission-lead", "2", "--sglang-max-running-requests", "2"]
    flags += ["--num-rollout", "4", "--verify-checkpoints", "--run-dir", str(folder)]
    failed = run(flags, tmp_path, code=1, FUSIONRL_TEST_SAMPLE="96").output()
    done = max(row["step"] for row in metrics_of(folder))
    assert 1 <= done < 4 and f"step_{done:06d} has all of it" in " ".join(failed.split()), failed[-3000:]
    run(["--run-dir", str(folder), "--resume"], tmp_path)
    assert [step for _, step in train_steps(folder)] == list(range(1, 5))
    prompts = trained_prompts(folder)
    assert len(prompts) == len(set(prompts)) == 8 * 4
