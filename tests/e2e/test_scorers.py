"""A run with a reward model and a teacher in it: two more kinds of engine, whose numbers are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fusionrl.observe.rollouts import read_rollouts
from tests.e2e.launch import metrics_of, run
from tests.e2e.samples import check, count_tool_answers, saved_samples
from tests.tiny_model import make_classifier

pytestmark = pytest.mark.e2e


def make_teacher(policy: Path, path: Path) -> Path:
    torch.manual_seed(8)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy), dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(policy).save_pretrained(path)
    return path


def rows_of(folder: Path, *, trained: bool) -> list[dict[str, Any]]:
    return [row for row in read_rollouts(folder) if (row["kind"] == "train") == trained]


def test_a_reward_model_and_a_teacher(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Samples of two turns with a tool's answer between them; the policy learns at the end, the others do not.

    A first step without learning leaves one model for transformers to score the tokens of both versions with.
    """
    folder, rm = tmp_path / "run", make_classifier(task / "model", tmp_path / "rm", 7)
    teacher = make_teacher(task / "model", tmp_path / "teacher")
    flags = list(rl_flags)
    flags[flags.index("--custom-rm-path") : flags.index("--custom-rm-path") + 2] = []
    flags += ["--rm-type", "reward_model:0.5+last_number:0.25", "--rm-model", str(rm)]
    flags += ["--use-opd", "--opd-teacher-load", str(teacher)]
    flags += ["--custom-generate-function-path", "tests/e2e/hooks.py:two_turns", "--rollout-max-response-len", "40"]
    flags += ["--eval-interval", "2", "--eval-prompt-data", "held-out", str(task / "eval.jsonl")]
    flags += ["--lr-warmup-iters", "1"]
    run([*flags, "--num-rollout", "2", "--skip-eval-before-train", "--no-save", "--run-dir", str(folder)], tmp_path)

    rows, evaluated = rows_of(folder, trained=True), rows_of(folder, trained=False)
    assert (len(rows), len(evaluated)) == (2 * 8 * 4, 32)
    assert {version for row in rows for version in row["weight_versions"]} == {0, 1}
    check(saved_samples(folder), task / "model")
    assert count_tool_answers(rows, task / "model", "=42 ") > 0
    judge = AutoModelForSequenceClassification.from_pretrained(rm, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    has_tool = False
    for row in rows + evaluated:
        ids, count = torch.tensor(row["tokens"])[None], row["response_length"]
        with torch.no_grad():
            score = float(judge(ids).logits[0, 0])
            log_probs = model(ids).logits[0, -count - 1 : -1].log_softmax(-1).gather(1, ids[0, -count:, None])[:, 0]
        parts = row["metadata"]["rewards"]
        assert abs(parts["reward_model"] - score) <= 1e-4
        assert row["reward"] == pytest.approx(0.5 * parts["reward_model"] + 0.25 * parts["last_number"])
        if row in evaluated:
            assert row["teacher_log_probs"] is None
            continue
        np.testing.assert_allclose(row["teacher_log_probs"], log_probs.numpy(), atol=1e-4)
        has_tool |= 0 in row["loss_mask"]
    assert has_tool

    trained = [line for line in metrics_of(folder) if "train/loss" in line]
    assert [line["train/lr"] for line in trained] == [0, 1e-3]
    assert sum(line["train/num_tokens"] for line in trained) == sum(sum(row["loss_mask"]) for row in rows)
    for line, of_rollout in zip(trained, (rows[:32], rows[32:]), strict=True):
        gaps = [
            student - taught
            for row in of_rollout
            for student, taught, mask in zip(
                row["rollout_log_probs"], row["teacher_log_probs"], row["loss_mask"], strict=True
            )
            if mask
        ]
        assert line["rollout/opd_reverse_kl"] == pytest.approx(np.mean(gaps), rel=1e-5)
        assert line["rollout/reward_reward_model"] == pytest.approx(
            np.mean([row["metadata"]["rewards"]["reward_model"] for row in of_rollout]), rel=1e-5
        )
    plan = (folder / "plan.txt").read_text()
    assert f"rm         1 x TP 1 of {rm}: [2]" in plan and f"teacher    1 x TP 1 of {teacher}: [3]" in plan
    assert {"reward-model-0.log", "teacher-0.log", "engine-0.log"} <= {path.name for path in folder.glob("logs/*")}
