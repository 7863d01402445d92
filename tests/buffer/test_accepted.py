"""Accepted samples: the best of each prompt, none twice, and every sample counted once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer.accepted import AcceptedSamples
from fusionrl.data.sample import Sample, Status


def sample(group: int, response: str, status: Status = Status.COMPLETED) -> Sample:
    messages = [{"role": "user", "content": f"p{group}"}]
    return Sample(group_index=group, prompt=f"p{group}", response=response, status=status, messages=messages)


def rows(path: Path) -> list[tuple[Any, ...]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["messages"][-1] == {"role": "assistant", "content": row["response"]} for row in found)
    return [(row["rollout_id"], row["prompt"], row["response"], row["reward"]) for row in found]


def test_each_sample_is_counted_once(tmp_path: Path) -> None:
    accepted = AcceptedSamples(tmp_path / "out.jsonl", threshold=0.5, per_prompt=2)
    samples = [
        *(sample(0, "good"), sample(0, "best"), sample(0, "best"), sample(0, "third")),
        *(sample(1, "bad"), sample(1, "cut off", Status.TRUNCATED), sample(1, "gone", Status.ABORTED)),
        *(sample(2, "good"),),
    ]
    counts = accepted.add(3, samples, [0.6, 0.9, 0.9, 0.5, 0.4, 1.0, 1.0, 0.7])
    wanted = {"considered": 8, "unfinished": 2, "below_threshold": 1, "duplicates": 1, "surplus": 1, "accepted": 3}
    assert counts == wanted
    assert rows(tmp_path / "out.jsonl") == [(3, "p0", "best", 0.9), (3, "p0", "good", 0.6), (3, "p2", "good", 0.7)]
    # The same prompt in another epoch, and in another process: only a new answer is accepted.
    for other in (accepted, AcceptedSamples(tmp_path / "out.jsonl", 0.5, 2)):
        assert other.add(4, [sample(0, "best")], [1.0])["duplicates"] == 1
    assert accepted.add(5, [sample(0, "new")], [1.0])["accepted"] == 1
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    assert summary["total"] == {**wanted, "considered": 10, "duplicates": 2, "accepted": 4}
    assert set(summary["steps"]) == {"4", "5", "6"} and summary["threshold"] == 0.5


def test_a_resumed_run_forgets_what_it_makes_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    accepted = AcceptedSamples(path, threshold=0.5, per_prompt=1)
    for rollout_id in range(3):
        accepted.add(rollout_id, [sample(rollout_id, "a")], [1.0])
    path.write_text(path.read_text() + '{"rollout_id": 2, "half a li')
    resumed = AcceptedSamples(path, threshold=0.5, per_prompt=1)
    resumed.forget_after(1)
    assert [row[0] for row in rows(path)] == [0, 1]
    assert json.loads((tmp_path / "out.jsonl.summary.json").read_text())["total"]["accepted"] == 2
    assert resumed.add(2, [sample(2, "a")], [1.0])["accepted"] == 1, "what was forgotten is no duplicate"
    AcceptedSamples(tmp_path / "none.jsonl", 0.5, 1).forget_after(-1)
    assert not (tmp_path / "none.jsonl").exists()


def test_what_could_not_be_written_is_no_duplicate_when_it_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "later" / "out.jsonl"
    accepted = AcceptedSamples(path, threshold=0.5, per_prompt=1)
    with pytest.raises(OSError, match="later"):
        accepted.add(0, [sample(0, "good")], [1.0])
    path.parent.mkdir()
    assert accepted.add(0, [sample(0, "good")], [1.0])["accepted"] == 1
    assert accepted.add(1, [sample(0, "good")], [1.0])["duplicates"] == 1
