"""The record of a stream's events: what is refused, and what a run that leaves it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer.schedule import Schedule, outlasts_record, read_schedule, schedule_file
from fusionrl.checks.rollout import replay_errors
from fusionrl.config.config import Config
from fusionrl.config.resume_differences import as_written
from fusionrl.observe.run_dir import RunDir
from fusionrl.pipeline.state import Admitted, Drop, Fetch, GroupFailed, GroupReady, SampleDone, StreamEnd

EVENTS = [Admitted(0, 1), Admitted(1, 1), SampleDone(1), GroupReady(1), Drop(0, "deadline"), Fetch(0, (1,), 0)]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A run's folder with these events, and with half a line that a kill left."""
    run = tmp_path / "run"
    with RunDir(run) as folder:
        folder.write_config(as_written(config()))
    schedule = Schedule(schedule_file(run, 1))
    for event in EVENTS:
        schedule.note(event)
    schedule.close()
    with schedule_file(run, 1).open("a") as file:
        file.write('["Pus')
    return run


def config(**flags: Any) -> Config:
    return Config.from_flat({"mode": "rl", "pipeline": "async", "lr": 1e-3} | flags)


def test_events_come_back_in_their_order(record: Path, tmp_path: Path) -> None:
    again = Schedule(tmp_path / "again.jsonl", read_schedule(record))
    assert again.num_admitted_next() == 2 and not again.is_due(Drop(0, "deadline"))
    for event in EVENTS:
        assert again.is_due(event)
        again.note(event)
    assert again.next is None and again.is_due(Drop(7, "filtered"))  # after its end all is free
    again.close()
    assert (tmp_path / "again.jsonl").read_text() + '["Pus' == schedule_file(record, 1).read_text()


def test_a_run_that_leaves_the_record_says_where(record: Path, tmp_path: Path) -> None:
    again = Schedule(tmp_path / "again.jsonl", read_schedule(record))
    with pytest.raises(ValueError, match="the record has Admitted 0 where this run comes to SampleDone 0"):
        again.note(SampleDone(0))
    for event in EVENTS[:-1]:
        again.note(event)
    with pytest.raises(ValueError, match=re.escape("has Fetch [1] where this run comes to Fetch [2]: it does not")):
        again.is_due(Fetch(0, (2,), 0))
    again.close()


@pytest.mark.parametrize("event", [GroupFailed(0, "lost"), StreamEnd()])
def test_what_does_not_repeat_is_refused(record: Path, event: Any) -> None:
    schedule_file(record, 1).unlink()
    schedule = Schedule(schedule_file(record, 1))
    schedule.note(event)
    schedule.close()
    with pytest.raises(ValueError, match=r"schedule.a1.jsonl, line 1: .* does not repeat by order alone"):
        read_schedule(record)


TURNS = [[7, [[0, 3], [1, 2]]], [8, [[1, 4]]]]


def test_the_record_of_answers_over_pushes(record: Path, tmp_path: Path) -> None:
    """It has the weight versions of each group that has all its answers, and why a group's are not repeatable."""

    def written(turns: Any) -> Path:
        schedule = Schedule(schedule_file(record, 1))
        schedule.note(Drop(2, "filtered"), TURNS[:1])
        schedule.note(GroupReady(3), turns)
        schedule.note(Drop(4, "surplus"))
        schedule.close()
        return record

    schedule_file(record, 1).unlink()
    again = Schedule(tmp_path / "again.jsonl", read_schedule(written(TURNS), needs_turns=True))
    assert again.turns == {2: TURNS[:1], 3: TURNS}
    assert not again.is_due(Drop(4, "surplus"))  # group 2 has not come to its end yet
    again.note(Drop(2, "filtered"), TURNS[:1])
    with pytest.raises(ValueError, match="has GroupReady 3 .* where this run comes to GroupReady 3 "):
        again.note(GroupReady(3), TURNS[1:])
    again.close()
    assert outlasts_record(record, record) is False
    schedule_file(tmp_path, 1).write_bytes(schedule_file(record, 1).read_bytes() + b'["Push"]\n')
    assert outlasts_record(tmp_path, record) and not outlasts_record(record, tmp_path)
    read_schedule(written("a turn had no answer"))
    with pytest.raises(ValueError, match=r"line 5: a turn had no answer, which no replay repeats; name another run"):
        read_schedule(record, needs_turns=True)
    schedule_file(record, 1).unlink()
    read_schedule(written(None))
    with pytest.raises(ValueError, match="lacks the weight versions of answers; record a run of this fusionrl"):
        read_schedule(record, needs_turns=True)


def test_a_record_that_does_not_fit_is_refused_before_the_run(record: Path, tmp_path: Path) -> None:
    def refused(run: Path = record, **flags: Any) -> str:
        (error,) = replay_errors(config(replay_schedule=str(run), **flags))
        return error

    assert replay_errors(config(replay_schedule=str(record), run_dir="other", save_hf="x", no_save=True)) == []
    assert replay_errors(config(pipeline="on-policy", replay_schedule="gone")) == []  # it has no effect there
    assert "other flags (--rollout-seed 42 -> 1; --lr 0.001 -> 1e-06); give the same" in refused(
        rollout_seed=1, lr=1e-6
    )
    assert "--prompt-data not given -> b.jsonl" in refused(prompt_data=["b.jsonl"])
    assert "gone: it is not the folder of a run" in refused(tmp_path / "gone")
    assert "the run, which --resume continues; leave one of them out" in refused(resume=True)
    assert "over the KV cache of older weights" in refused(pipeline="async-partial", in_flight="in_place")
    assert "--agent-path a.b asks over HTTP" in refused(pipeline="async-partial", agent_path="a.b")
    assert "--rollout-function-path a.b makes groups in an order of its own" in refused(rollout_function_path="a.b")
    schedule_file(record, 2).touch()
    assert "it was resumed" in refused()
    schedule_file(record, 2).unlink()
    schedule_file(record, 1).write_text(json.dumps({"an": "object"}))
    assert "line 1: it is not an event" in refused()
    schedule_file(record, 1).unlink()
    assert "it has no schedule.a1.jsonl; a run under a pipeline that runs ahead writes it" in refused()
