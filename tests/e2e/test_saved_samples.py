"""What a run saves of its samples, against transformers: of partial rollouts, of several turns, of other engines.

Samples of agents: test_sessions.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fusionrl.observe.rollouts import read_rollouts
from tests.e2e.deaths import kill_and_check
from tests.e2e.launch import launch, metrics_of, run
from tests.e2e.samples import check, count_tool_answers
from tests.tiny_model import make_classifier
from tests.warm_start import ForkedDriver

pytestmark = pytest.mark.e2e


def test_partial_rollouts(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """The mask, log-prob and version that a token was sampled by.

    The learning rate is 0, so that one model can score what all versions of the weights sampled.
    """
    folder = tmp_path / "run"
    flags = [*rl_flags, "--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--over-sampling-batch-size", "16"]
    flags += ["--rollout-max-response-len", "450"]
    flags += ["--custom-generate-function-path", "tests/e2e/hooks.py:overlong_ahead"]
    flags += ["--num-rollout", "100", "--lr", "0", "--no-save"]
    launched = launch([*flags, "--run-dir", str(folder)], tmp_path)
    assert isinstance(launched.process, ForkedDriver), "else each whole run of the suite takes two seconds longer"
    # The run has shown all it can after three rollouts; a death of an engine's actor ends it.
    died = ("engine-actor-0.a1.log", "engine 0 died: its process ")
    kill_and_check(launched, folder, lambda: len(metrics_of(folder)) > 3, *died)
    metrics = [row for row in metrics_of(folder) if row["step"] <= 3]
    rows = [row for row in read_rollouts(folder, "train") if row["rollout_id"] < 3]
    assert len(rows) == 3 * 8 * 4
    assert sum(row["rollout/partial_samples"] for row in metrics if "rollout/partial_samples" in row) > 0
    check(rows, task / "model")
    mixed = [row for row in rows if len(set(row["weight_versions"])) > 1]
    assert mixed
    for row in rows:  # only what this rollout sampled is trained on; of a sibling finished in an earlier one nothing
        assert row["loss_mask"] == [int(version == row["rollout_id"]) for version in row["weight_versions"]]
    trained = [row["rollout/staleness/token_max"] for row in metrics if "rollout/staleness/token_max" in row]
    # Where the engine was done with a rollout's samples before the rollout began, none of its tokens is trained on.
    assert trained == [0] * len({row["rollout_id"] for row in rows if sum(row["loss_mask"])}) and trained


def make_teacher(policy: Path, path: Path) -> Path:
    torch.manual_seed(8)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy), dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(policy).save_pretrained(path)
    return path


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

    rows = list(read_rollouts(folder, "train"))
    evaluated = [row for row in read_rollouts(folder) if row["kind"] != "train"]
    assert (len(rows), len(evaluated)) == (2 * 8 * 4, 32)
    assert {version for row in rows for version in row["weight_versions"]} == {0, 1}
    check(rows, task / "model")
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
