"""The record of what a process does: complete, nested, visible from outside, cheap, and never in a run's way."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionrl.observe import spans
from fusionrl.observe.spans import course, part


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    spans.record_to(tmp_path, "trainer-0", attempt=2)
    yield tmp_path / "timeline" / "trainer-0.a2.jsonl"
    spans.stop_recording()


def _records(file: Path) -> list:
    """What was written so far, but for the header; of a recorder that was stopped, all."""
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def _phase(name: str) -> None:
    with spans.phase(name), spans.span("part"):
        pass


def test_spans_nest_and_carry_their_facts(file: Path) -> None:
    with pytest.raises(ZeroDivisionError), spans.phase("train", step=3), spans.span("forward", micro_batch=1):
        1 / 0  # noqa: B018
    assert spans.main_phases().open is None, "a failure ends it, too"
    header = json.loads(file.read_text().splitlines()[0])
    assert (header["process"], header["attempt"], header["pid"]) == ("trainer-0", 2, os.getpid())
    begun, inner, outer = _records(file)
    assert begun[:3] == ["B", "", "train"] and begun[4] == {"step": 3} and outer[2:4] == begun[2:4]
    assert inner[2] == "forward" and inner[5] == {"micro_batch": 1}
    assert outer[3] <= inner[3] and inner[3] + inner[4] <= outer[3] + outer[4]


def test_small_records_are_kept_in_memory_until_a_phase_ends(file: Path) -> None:
    for index in range(20):
        spans.note("decode", time.monotonic_ns(), time.monotonic_ns(), lane=f"sample {index}", tokens=4)
    spans.count("engine", running=3)
    assert _records(file) == []
    _phase("generate")
    assert len(_records(file)) == 24


def test_threads_have_lanes_of_their_own(file: Path) -> None:
    with spans.phase("push"):
        thread = threading.Thread(target=_phase, args=["send"], name="feed-1")
        thread.start()
        thread.join()
    assert {(one[2], one[1]) for one in _records(file)} == {("push", ""), ("send", "feed-1"), ("part", "feed-1")}


def test_a_fork_records_nothing_of_its_own(file: Path) -> None:
    with spans.phase("generate"):
        if (child := os.fork()) == 0:
            spans.note("of the child", 0, 1)
            spans.stop_recording()
            os._exit(0)
        os.waitpid(child, 0)
    assert [one[2] for one in _records(file)] == ["generate", "generate"]


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    recorder = spans.Recorder(tmp_path / "a.jsonl", "driver", 1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), recorder._file)
    for _ in range(2):
        recorder.end(recorder.begin("train", {}, True))
    recorder.close()


def test_a_fact_that_json_cannot_hold_is_left_out_with_its_record(file: Path) -> None:
    with spans.phase("train"):
        for value in (1 << 70, "\ud800"):
            spans.note("sample", 0, 1, index=value)
    assert [record[2] for record in _records(file)] == ["train", "train"]


def test_a_process_is_named_by_its_log_and_a_link_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline, logs = tmp_path / "timeline", tmp_path / "logs"
    spans.record_beside(logs / "engine-actor-1.a3.log")
    spans.stop_recording()
    assert (timeline / "engine-actor-1.a3.jsonl").is_file()
    spans.record_beside(logs / "a user's.log")
    assert spans.recorder() is None
    (timeline / "driver.a1.jsonl").symlink_to(tmp_path / "elsewhere")
    spans.record_to(tmp_path, "driver", 1)
    assert spans.recorder() is None and "timeline" in caplog.text and not (tmp_path / "elsewhere").exists()


def test_clocks_are_measured_by_round_trips() -> None:
    def ask() -> tuple[str, int]:
        time.sleep(0.002)
        answer = time.monotonic_ns() + 5_000_000_000
        time.sleep(0.001)
        return "another boot", answer

    assert spans.measure_offset(spans.clock) == (spans.boot_id(), 0, 0), "this machine needs no correction"
    boot, offset, error = spans.measure_offset(ask)
    assert boot == "another boot" and abs(offset - 5_000_000_000) <= error <= 5_000_000


def test_the_main_threads_phases_are_known_with_their_times(file: Path) -> None:
    """Those of other threads and lanes do not count."""
    other = threading.Thread(target=_phase, args=["other"])
    with spans.phase("step"):
        for _ in range(2):
            _phase("train")
        other.start()
        other.join()
        with spans.phase("rollout", lane="rollouts"):
            found = spans.main_phases()
    assert found.open is not None and found.open.name == "step"
    assert found.open.start_ns < found.ended_ns < time.monotonic_ns()
    assert {name: len(times) for name, times in found.lasted.items()} == {"train": 2}
    assert all(0.0 <= seconds < 1.0 for seconds in found.lasted["train"]) and spans.main_phases().open is None


def test_the_course_of_a_sample_is_one_record_with_its_parts(file: Path) -> None:
    """A cancelled one is aborted; what belongs to no sample is a span of the rewards."""

    async def score() -> None:
        start = time.monotonic_ns()
        await asyncio.sleep(0.001)
        part("reward", start, index=7)

    async def sample(index: int, seconds: float) -> None:
        with course(index=index) as facts:
            start = time.monotonic_ns()
            await asyncio.sleep(0.002)
            part("turn", start, tokens=5)
            await asyncio.gather(score(), score())  # tasks of their own
            await asyncio.sleep(seconds)
            facts["status"] = "completed"

    async def all_three() -> None:
        late = asyncio.wait_for(sample(3, 60), 0.3)
        await asyncio.gather(sample(1, 0), sample(2, 0), late, return_exceptions=True)

    asyncio.run(all_three())
    part("reward", time.monotonic_ns(), samples=8)
    spans.stop_recording()
    part("reward", time.monotonic_ns(), samples=8)  # without a recorder nothing happens
    *samples, of_none = _records(file)
    assert of_none[:3] == ["X", "rewards", "reward"] and of_none[5] == {"samples": 8}
    found = sorted(samples, key=lambda record: record[3]["index"])
    assert [record[3]["status"] for record in found] == ["completed", "completed", "aborted"]
    for _, start, duration, _, parts in found:
        assert [one[0] for one in parts] == ["turn", "reward", "reward"]
        assert all(start <= one[1] and one[1] + one[2] <= start + duration for one in parts)
