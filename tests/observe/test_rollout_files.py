"""Rollout files: whole or absent, never overwritten, readable by any JSON reader."""

import enum
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fusionrl.observe.metrics import next_attempt
from fusionrl.observe.rollouts import RolloutWriter, list_rollouts, read_rollouts, rollout_of_step


class Status(enum.Enum):
    COMPLETED = "completed"


def test_a_sample_comes_back_as_it_was(tmp_path: Path) -> None:
    plain = {"index": 3, "response": "für 数\n"}
    metadata = {7: {"a", "b"}, "path": Path("x/y"), "nan": float("nan"), True: 1, None: 2, 1e20: 3}
    row = plain | {"tokens": np.array([1, 2, 3]), "status": Status.COMPLETED, "metadata": metadata}
    row["rollout_log_probs"] = torch.tensor([-0.1, -2.5])
    path = RolloutWriter(tmp_path).write(12, 1, [row, {"rollout_id": None}, {"rollout_id": 7}])
    assert path == tmp_path / "rollouts" / "step_000013.train.a1.jsonl", "after it, 13 rollouts are finished"
    back, *others = read_rollouts(tmp_path)
    assert [one["rollout_id"] for one in others] == [12, 12], "a sample's own is that of its attempt, mostly null"
    assert back.pop("rollout_log_probs") == [float(np.float32(-0.1)), -2.5], "exactly the float32 values"
    metadata = {"7": ["a", "b"], "path": "x/y", "nan": None, "True": 1, "None": 2, "1e+20": 3}
    place = {"step": 13, "rollout_id": 12, "kind": "train", "attempt": 1}
    assert back == place | plain | {"tokens": [1, 2, 3], "status": "completed", "metadata": metadata}


def test_arrays_are_read_back_exactly_and_what_is_odd_is_written_all_the_same(tmp_path: Path) -> None:
    values = np.random.default_rng(0).exponential(size=5000).astype(np.float32) * np.float32(1e-3)
    rows = [
        {"log_probs": values, "tokens": np.arange(10, dtype=np.int32)[::3], "mask": np.broadcast_to(np.float32(1), 3)},
        {"log_probs": np.array([-0.5, np.nan, -np.inf], np.float32), "reward": float("nan")},
        {"metadata": {7: 2**70, "tool": slice(1, 2)}, "response": "\ud800 é", "nan": float("inf")},
    ]
    path = RolloutWriter(tmp_path).write(0, 1, rows)
    assert b"NaN" not in path.read_bytes() and b"Infinity" not in path.read_bytes()
    whole, gaps, odd = read_rollouts(tmp_path)
    assert np.array_equal(np.asarray(whole["log_probs"], np.float32), values), "bit for bit"
    assert whole["tokens"] == [0, 3, 6, 9] and whole["mask"] == [1, 1, 1]
    assert gaps["log_probs"] == [-0.5, None, None] and gaps["reward"] is None
    assert odd["metadata"] == {"7": 2**70, "tool": "slice(1, 2, None)"}
    assert odd["response"] == "\ud800 é" and odd["nan"] is None


def test_a_file_is_never_overwritten_nor_outside_the_folder(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    path = writer.write(0, 1, [{"reward": 1}])
    with pytest.raises(FileExistsError, match="never overwritten"):
        writer.write(0, 1, [{"reward": 2}])
    (tmp_path / "elsewhere").write_text("precious")
    (path.parent / f".step_000002.train.a1.jsonl.{os.getpid()}.tmp").symlink_to(tmp_path / "elsewhere")
    writer.write(1, 1, [{"reward": 2}])
    assert (tmp_path / "elsewhere").read_text() == "precious", "a link of somebody else is not written through"
    with pytest.raises(ValueError, match="eval/gsm8k"):
        writer.write(0, 1, [], "eval/gsm8k")
    assert json.loads(path.read_text()) == {"reward": 1}


def test_a_failure_half_way_leaves_no_file(tmp_path: Path) -> None:
    def rows() -> Iterator[dict]:
        yield {"reward": 1}
        raise RuntimeError("the generator died")

    with pytest.raises(RuntimeError):
        RolloutWriter(tmp_path).write(0, 1, rows())
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_reading_takes_the_last_attempt_in_order_and_by_kind(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    for rollout_id, attempt, kind in [(1, 1, "train"), (0, 1, "train"), (1, 10, "train"), (1, 2, "train")]:
        writer.write(rollout_id, attempt, [{"reward": attempt}], kind)
    writer.write(1, 1, [{"reward": 0.5}], "eval-gsm8k")
    (tmp_path / "rollouts" / ".step_000002.train.a1.jsonl.7.tmp").write_text("{")
    assert [(row["rollout_id"], row["reward"]) for row in read_rollouts(tmp_path, "train")] == [(0, 1), (1, 10)]
    assert len(list_rollouts(tmp_path, all_attempts=True)) == 5
    assert [(f.step, f.kind) for f in list_rollouts(tmp_path)] == [(1, "train"), (1, "eval-gsm8k"), (2, "train")]


def test_a_folder_of_an_earlier_version_is_read_and_continued(tmp_path: Path) -> None:
    """Its training files were numbered by rollout_id; a resume adds files that are numbered by step."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name, reward in (("train_000000.a1", 0), ("train_000001.a1", 1), ("eval-set_000001.a1", 2)):
        (folder / f"{name}.jsonl").write_text(json.dumps({"reward": reward}) + "\n")
    assert next_attempt(tmp_path) == 2
    RolloutWriter(tmp_path).write(1, 2, [{"reward": 3}])
    RolloutWriter(tmp_path).write(2, 2, [{"reward": 4}])
    rows = [(row["step"], row["rollout_id"], row["kind"], row["reward"]) for row in read_rollouts(tmp_path)]
    assert rows == [(1, 0, "train", 0), (1, 1, "eval-set", 2), (2, 1, "train", 3), (3, 2, "train", 4)]
    assert rollout_of_step(tmp_path, 1).path.name == "train_000000.a1.jsonl"
    assert rollout_of_step(tmp_path, 2).attempt == 2
    assert rollout_of_step(tmp_path).step == 3
    with pytest.raises(ValueError, match="--step 7: .* has samples of steps 1-3"):
        rollout_of_step(tmp_path, 7)


def test_scanning_leaves_out_what_runs_over_tokens_and_nothing_else(tmp_path: Path) -> None:
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    rows = [
        {"index": 0, "tokens": np.arange(3), "rollout_routed_experts": experts, "reward": 1.0, "response": "a"},
        {"index": 1, "response": 'he said "tokens":[1,2] and "loss_mask":[', "loss_mask": [0, 1], "reward": 0.5},
        {"index": 2, "metadata": {"tokens": ["a]b", [1]]}, "tokens": [4], "response": "ü"},
        {"index": 3, "metadata": {"tokens": [[1], [2]], 'x"tokens': [3]}, "reward": {"a": 1.0}},
        {"index": 4, "response": "\ud800", "big": 2**70, "tokens": [1]},
    ]
    RolloutWriter(tmp_path).write(0, 1, rows)
    (file,) = list_rollouts(tmp_path)
    heavy = {"tokens", "loss_mask", "rollout_routed_experts"}
    for (offset, light), whole in zip(file.scan(), file.rows(), strict=True):
        assert light is not None
        for name in whole.keys() - heavy:
            assert light[name] == whole[name], name
        assert file.row_at(offset) == whole
    assert "tokens" not in next(file.scan())[1]


def test_what_the_trainers_found_out_stands_beside_a_rollout(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    path = writer.write(0, 1, [{"index": 0}, {"index": 1}])
    assert list_rollouts(tmp_path)[0].trained() == {}
    writer.write_trained(path, [{"line": 1, "advantage": 0.5, "entropy": np.array([0.1, 0.2], np.float32)}])
    (file,) = list_rollouts(tmp_path)
    assert file.trained() == {1: {"line": 1, "advantage": 0.5, "entropy": [0.1, 0.2]}}
    assert "entropy" not in file.scan_trained()[1][1]
    assert [row["index"] for row in read_rollouts(tmp_path)] == [0, 1], "it is no rollout itself"
    with pytest.raises(FileExistsError):
        writer.write_trained(path, [])
