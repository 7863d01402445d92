"""Samples whose numbers cannot be trained on are refused where they come in."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.data.sample import Sample
from fusionrl.data.sample_checks import check_values, read_samples

GOOD: dict[str, Any] = {
    "index": 3,
    "tokens": [1, 2, 3, 4],
    "response_length": 2,
    "response": "cd",
    "loss_mask": [1, 0],
    "rollout_log_probs": [-0.5, 0.0],
    "weight_versions": [0, 7],
    "reward": 1.0,
    "status": "completed",
}
# (field, its value, what the message says besides the field)
WRONG: list[tuple[str, Any, str]] = [
    ("tokens", [1, 2, 3, 512], r"512 at place 3; the model's tokens are 0\.\.511"),
    ("tokens", [1, 2, 3, -1], "-1 at place 3"),
    ("tokens", [1, 2, 3, 1.5], "1.5"),
    ("tokens", [1, 2, 3, None], "None"),
    ("tokens", [1, 2, 3, "4"], "'4'"),
    ("tokens", [1, 2, 3, True], "True"),
    ("tokens", [1, 2, 3, 2**40], "1099511627776"),
    ("tokens", [1, 2, 3, [4]], r"\[4\]"),
    ("tokens", "abcd", "abcd"),
    ("tokens", [1], "response_length 2 exceeds"),
    ("rollout_log_probs", [-0.5, float("nan")], "nan|NaN"),
    ("rollout_log_probs", [-0.5, float("-inf")], "inf|Infinity"),
    ("rollout_log_probs", [-0.5, 1e30], r"1e\+30"),
    ("rollout_log_probs", [-0.5, -1e30], r"-1e\+30"),
    ("rollout_log_probs", [-0.5, 0.5], "0.5 at place 1"),
    ("rollout_log_probs", [-0.5, None], "None"),
    ("rollout_log_probs", [-0.5], "1 values for 2 response tokens"),
    ("teacher_log_probs", [-0.5, 2.0], "2 at place 1"),
    ("loss_mask", [1, 2], "2 at place 1"),
    ("loss_mask", [1, -1], "-1 at place 1"),
    ("loss_mask", [1, "0"], "'0'"),
    ("weight_versions", [0, -2], "-2 at place 1"),
    ("weight_versions", [0, 0.5], "0.5"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG, ids=[f"{f}={str(v)[:30]}" for f, v, _ in WRONG])
def test_a_saved_sample_names_file_line_and_field(field: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, field: value}) + "\n")
    with pytest.raises(ValueError, match=rf"rollout\.jsonl, line 2: .*({message})"):
        read_samples(path, 512)


# True is 1 in Python, and so it is here.
OF_HOOKS = [case for case in WRONG if case[1] != [1, 2, 3, True]]


@pytest.mark.parametrize(("field", "value", "message"), OF_HOOKS, ids=[f"{f}={str(v)[:30]}" for f, v, _ in OF_HOOKS])
def test_a_sample_of_a_hook_names_the_field(field: str, value: Any, message: str) -> None:
    sample = Sample(**{**copy.deepcopy(GOOD), "status": Sample.Status.COMPLETED, field: value})
    with pytest.raises((ValueError, TypeError), match="sample 3: |tokens"):
        check_values(sample, 512)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("1e999", "reward is inf, not a finite number"),
        ("-1e999", "reward is -inf"),
        ("1" + "0" * 400, "reward is 1000.*not a finite number"),
        ('"1.0"', r"reward is '1\.0', not a finite number or a dict of such"),
        ("[1.0]", r"reward is \[1\.0\]"),
        ('{"score": 1.0, "length": 1e999}', r"reward\['length'\] is inf"),
    ],
)
def test_a_reward_that_is_no_number(reward: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    line = json.dumps({**GOOD, "reward": "REWARD"})
    path.write_text(json.dumps(GOOD) + "\n" + line.replace('"REWARD"', reward) + "\n")
    with pytest.raises(ValueError, match=rf"rollout\.jsonl, line 2: {message}"):
        read_samples(path, 512)


@pytest.mark.parametrize("reward", [None, 1, -0.5, True, {"score": 1.0, "acc": True, "pred": "42"}, {"score": None}])
def test_rewards_that_are_read(reward: Any, tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    path.write_text(json.dumps({**GOOD, "reward": reward}) + "\n")
    assert read_samples(path, 512)[0].reward == reward


def test_a_baseline_reward_that_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    path.write_text(json.dumps({**GOOD, "baseline_reward": {"score": 1.0}}) + "\n")
    with pytest.raises(ValueError, match="line 1: baseline_reward is .*not a finite number"):
        read_samples(path, 512)


def test_experts_that_the_model_does_not_have() -> None:
    sample = Sample(index=1, tokens=[1, 2], response_length=1, rollout_routed_experts=np.array([[[0, 4]], [[1, -1]]]))
    check_values(sample, 512, num_experts=5)
    with pytest.raises(ValueError, match=r"rollout_routed_experts holds 4 at place 0, 0, 1; .* 0\.\.3"):
        check_values(sample, 512, num_experts=4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "a list, not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"tokens": [1], "reward": NaN}', "NaN is no JSON number"),
        ('{"status": "sleeping"}', "sleeping"),
        ('{"response_length": -1}', "response_length is -1"),
        ('{"metadata": 7}', "metadata is 7"),
        ('{"response": 7}', "response is 7"),
        ('{"tokens": [' + "9" * 5000 + "]}", "digits|32-bit"),
    ],
)
def test_a_line_that_is_no_sample(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"line 2: .*({message})"):
        read_samples(path, 512)


def test_what_a_run_writes_is_read_back(tmp_path: Path) -> None:
    """Also a label of over 64 bits, which orjson would round."""
    path = tmp_path / "rollout.jsonl"
    path.write_text(json.dumps({**GOOD, "label": 2**80, "response": "\ud800"}) + "\n")
    (sample,) = read_samples(path, 512)
    assert sample.label == 2**80
    assert np.asarray(sample.tokens).tolist() == GOOD["tokens"]
    assert sample.to_dict() | {"label": 0, "response": ""} == Sample.from_dict(GOOD).to_dict() | {
        "label": 0,
        "response": "",
    }


def test_a_file_without_samples(tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="it holds no samples"):
        read_samples(path)
