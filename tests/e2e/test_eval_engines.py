"""A whole run whose evaluations have engines of their own: training goes on, and each result is of one version."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.observe.rollouts import list_rollouts
from tests.e2e.launch import metrics_of, run, undocumented_files
from tools.family_loops import make_model

pytestmark = pytest.mark.e2e


def answers(folder: Path, step: int) -> list[dict[str, Any]]:
    file = next(one for one in list_rollouts(folder) if one.kind == "eval-held" and one.step == step)
    return list(file.rows())


def log_probs(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.concatenate([row["rollout_log_probs"] for row in rows])


def test_training_goes_on_during_an_evaluation(rl_flags: list[str], task: Path, tmp_path: Path) -> None:
    """The model is gemma3_text, whose attention looks back over a window."""
    folder, model, final = tmp_path / "run", tmp_path / "model", tmp_path / "final"
    make_model("gemma3_text", task, model)
    (tmp_path / "eval.yaml").write_text(
        "eval:\n  datasets:\n    - name: held\n"
        f"      path: {task / 'eval.jsonl'}\n      temperature: 0\n      n_samples_per_eval_prompt: 1\n"
        "      custom_generate_function_path: tests/e2e/hooks.py:late\n"
    )
    sets = ["--eval-config", str(tmp_path / "eval.yaml")]
    flags = [
        *rl_flags,
        *sets,
        "--hf-checkpoint",
        str(model),
        "--run-dir",
        str(folder),
        "--pipeline",
        "async",
        "--num-rollout",
        "5",
    ]
    flags += ["--eval-interval", "3", "--skip-eval-before-train", "--eval-num-gpus", "1", "--verify-weights", "always"]
    run([*flags, "--save-hf", str(final)], tmp_path)

    lines = metrics_of(folder)
    trained = {line["step"]: line for line in lines if "train/loss" in line}
    evaluated = {line["step"]: line for line in lines if "eval/held/reward" in line}
    assert (sorted(trained), sorted(evaluated)) == ([1, 2, 3, 4, 5], [3, 5])
    begun = evaluated[3]["time"] - evaluated[3]["perf/time_eval_s"]
    # The clock of the evaluation starts with its first request, which comes late on a busy machine.
    assert begun < trained[4]["time"] + 1 and trained[4]["time"] < evaluated[3]["time"], "step 4 was made meanwhile"
    assert evaluated[3]["time"] <= trained[5]["time"] and trained[5]["perf/time_wait_eval_s"] > 0
    assert [evaluated[step]["eval/weight_version"] for step in (3, 5)] == [3.0, 5.0]
    for step in (3, 5):
        assert {version for row in answers(folder, step) for version in row["weight_versions"]} == {step}
    # A push without an evaluation goes to one engine, the first one and those with an evaluation to both.
    tensors = {line["step"]: line["sync/verify_tensors"] for line in lines if "sync/verify_tensors" in line}
    assert {step: count // tensors[1] for step, count in tensors.items()} == {0: 2, 1: 1, 2: 1, 3: 2, 4: 1, 5: 2}
    assert undocumented_files(folder) == []

    # The same weights, evaluated in turn by an engine that loaded them.
    alone = ["--mode", "eval", "--device", "cpu", "--hf-checkpoint", str(final), *sets, "--input-key", "prompt"]
    alone += ["--label-key", "label", "--apply-chat-template", "--custom-rm-path", "tests/e2e/hooks.py:partial_credit"]
    run([*alone, "--rollout-max-response-len", "6", "--run-dir", str(tmp_path / "alone")], tmp_path)
    (row,) = metrics_of(tmp_path / "alone")
    assert 0 <= row["eval/held/accuracy"] <= 1 and row["eval/held/num_samples"] == 32
    assert not list((tmp_path / "alone" / "logs").glob("trainer-*.log")), "eval starts no trainer"
    assert undocumented_files(tmp_path / "alone") == []
    at_once, in_turn = answers(folder, 5), answers(tmp_path / "alone", 0)
    assert len(at_once) == 32
    assert [row["tokens"] for row in at_once] == [row["tokens"] for row in in_turn]
    assert np.abs(log_probs(at_once) - log_probs(in_turn)).max() < 1e-4, "the same weights"
    first = [np.array([row["rollout_log_probs"][0] for row in rows]) for rows in (at_once, answers(folder, 3))]
    assert np.abs(first[0] - first[1]).max() > 3e-3, "others: the same tokens' log-probs can agree in the mean"
    assert [row["reward"] for row in at_once] == [row["reward"] for row in in_turn]
    found = [
        json.loads((run_dir / "eval" / name).read_text())
        for run_dir, name in ((folder, "5.json"), (tmp_path / "alone", "0.json"))
    ]
    assert found[0]["sets"]["held"]["metrics"] == found[1]["sets"]["held"]["metrics"]
