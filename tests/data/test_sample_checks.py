"""Samples whose numbers cannot be trained on are refused where they come in."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.data.sample import Sample
from fusionrl.data.sample_json import check_values, read_samples

GOOD: dict[str, Any] = {"index": 3, "tokens": [1, 2, 3, 4], "response_length": 2, "response": "cd", "loss_mask": [1, 0]}
GOOD |= {"rollout_log_probs": [-0.5, 0.0], "weight_versions": [0, 7], "reward": 1.0, "status": "completed"}
# (field, its value, what the message says besides the field)
WRONG: list[tuple[str, Any, str]] = [
    ("tokens", [1, 2, 3, 512], r"512 at place 3; the model's tokens are 0\.\.511"),
    ("tokens", [1, 2, 3, -1], "-1 at place 3"),
    *(("tokens", [1, 2, 3, wrong], str(wrong)) for wrong in (1.5, None, "4", True, 2**40, [4])),
    ("tokens", "abcd", "abcd"),
    ("tokens", [1], "response_length 2 exceeds"),
    ("rollout_log_probs", [-0.5, float("nan")], "nan|NaN"),
    ("rollout_log_probs", [-0.5, float("-inf")], "inf|Infinity"),
    ("rollout_log_probs", [-0.5, -1e30], r"-1e\+30"),
    ("rollout_log_probs", [-0.5, 0.5], "0.5 at place 1"),
    ("rollout_log_probs", [-0.5, None], "None"),
    ("rollout_log_probs", [-0.5], "1 values for 2 response tokens"),
    ("teacher_log_probs", [-0.5, 2.0], "2 at place 1"),
    ("teacher_log_probs", [-0.5], "1 values for 2 response tokens"),
    ("loss_mask", [1, 2], "2 at place 1"),
    ("loss_mask", [1, -1], "-1 at place 1"),
    ("loss_mask", [1, "0"], "'0'"),
    ("weight_versions", [0, -2], "-2 at place 1"),
    ("weight_versions", [0, 0.5], "0.5"),
]


def read(folder: Path, *rows: dict[str, Any] | str) -> list[Sample]:
    """Samples of a file behind a good one; a row that is a text stands as it is."""
    path = folder / "rollout.jsonl"
    lines = [row if isinstance(row, str) else json.dumps({**GOOD, **row}) for row in ({}, *rows)]
    path.write_text("".join(line + "\n" for line in lines))
    return read_samples(path, 512)[1:]


@pytest.mark.parametrize(("field", "value", "message"), WRONG, ids=[f"{f}={str(v)[:30]}" for f, v, _ in WRONG])
def test_a_wrong_value_names_its_field(field: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.jsonl, line 2: .*({field}|JSON number)") as raised:
        read(tmp_path, {field: value})
    assert re.search(message, str(raised.value))
    if value != [1, 2, 3, True]:  # True is 1 in Python, and so it is in a hook's list
        sample = Sample(**{**copy.deepcopy(GOOD), "status": Sample.Status.COMPLETED, field: value})
        with pytest.raises((ValueError, TypeError), match="sample 3: |tokens"):
            check_values(sample, 512)


REWARDS = ("1e999", "-1e999", "1" + "0" * 400, '"1.0"', "[1.0]", '{"score": 1.0, "length": 1e999}')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((f'{{"reward": {reward}}}', "reward is .*valid|finite number") for reward in REWARDS),
        ('{"baseline_reward": {"score": 1.0}}', "baseline_reward is .*valid number"),
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
    with pytest.raises(ValueError, match=rf"rollout\.jsonl, line 2: .*({message})"):
        read(tmp_path, line)


def test_what_a_run_writes_is_read_back(tmp_path: Path) -> None:
    """Also a label of over 64 bits, which orjson would round, and rewards of each kind."""
    rewards = [None, 1, -0.5, True, {"score": 1.0, "acc": True, "pred": "42"}, {"score": None}]
    assert [sample.reward for sample in read(tmp_path, *({"reward": reward} for reward in rewards))] == rewards
    (sample,) = read(tmp_path, {"label": 2**80, "response": "\ud800"})
    assert sample.label == 2**80 and sample.array("tokens").tolist() == GOOD["tokens"]  # type: ignore[union-attr]
    rest = {"label": 0, "response": ""}
    assert sample.to_dict() | rest == Sample.from_dict(GOOD).to_dict() | rest
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="it holds no samples"):
        read_samples(tmp_path / "empty.jsonl")


def test_experts_that_the_model_does_not_have() -> None:
    sample = Sample(index=1, tokens=[1, 2], response_length=1, rollout_routed_experts=np.array([[[0, 4]], [[1, -1]]]))
    check_values(sample, 512, num_experts=5)
    with pytest.raises(ValueError, match=r"rollout_routed_experts holds 4 at place 0, 0, 1; .* 0\.\.3"):
        check_values(sample, 512, num_experts=4)
