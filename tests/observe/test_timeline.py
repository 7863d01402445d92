"""`fusionrl timeline`: the file keeps the rules of its format, and the report says where the time went."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fusionrl import cli
from fusionrl.observe.timeline.records import read_attempt, steps_of
from fusionrl.observe.timeline.report import driver_shares, pools, summarize_steps
from tests.observe.timeline_runs import WALL_NS, Process, S, make_run
from tests.observe.trace_format import faults

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def _trace(run: Path, *flags: str) -> list[dict[str, Any]]:
    assert cli.main(["timeline", str(run), "--check", *flags]) == 0
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert faults(events) == []
    return events


def _spans(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def _driver(run: Path) -> Path:
    return run / "timeline" / "driver.a1.jsonl"


def _process_names(events: list[dict[str, Any]]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def test_every_process_is_in_the_file_on_one_clock(run: Path, capsys: Capsys) -> None:
    events = _trace(run)
    names = _process_names(events)
    assert set(names.values()) == {"driver", "buffer", "trainer-0", "trainer-1", "engine-actor-0", "samples"}
    of = {(names[event["pid"]], event["name"], event["ts"] / S) for event in events if event["ph"] == "X"}
    assert {("driver", "train", 11.0), ("trainer-1", "train", 11.1), ("engine-actor-0", "load weights", 14.2)} <= of
    assert "1 machine" in capsys.readouterr().out
    train, forward, *turn = (_spans(events, name)[0] for name in ("train", "forward", "queue", "prefill", "decode"))
    of_rank = [event for event in _spans(events, "train") if event["pid"] == forward["pid"]]
    assert of_rank and of_rank[0]["tid"] == forward["tid"] != train["tid"]
    # A turn is divided where the engine told its times.
    assert [(one["ts"] / S, one["dur"] / S) for one in turn] == [(5.2, 0.2), (5.4, 0.3), (5.7, 4.8)]


def test_arrows_lead_from_a_sample_to_the_first_token_of_the_next_weights(run: Path) -> None:
    events = _trace(run)
    names = _process_names(events)
    flows: dict[int, list[str]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(names[event["pid"]])
    ways = Counter(map(tuple, flows.values()))
    assert ways["samples", "buffer"] == 40
    assert ways["buffer", "trainer-0", "trainer-0", "samples"] == 1  # the second step's push has no sample after it
    assert ways["buffer", "trainer-1", "trainer-1"] == 1


def test_the_longest_samples_and_all_aborted_ones_are_shown(run: Path) -> None:
    Process(run, "buffer", 2).sample(99, [("turn", 20, 20.1, {})], status="aborted")
    events = _trace(run, "--samples", "1")
    shown = {event["name"] for event in events if event["ph"] == "X" and event["name"].startswith("sample ")}
    assert shown == {"sample 27", "sample 47", "sample 20", "sample 40", "sample 99"}  # 20 and 40 had new weights first
    trained = [event for event in _spans(_trace(run, "--steps", "2"), "train") if event["pid"] == 1]
    assert {event["args"]["step"] for event in trained} == {2}, "steps can be chosen"


def test_shares_add_up(run: Path) -> None:
    recorded = read_attempt(run, 1)
    shares = driver_shares(recorded, 0, recorded.end)
    assert sum(shares.values()) == recorded.end == 26 * S
    expected = {"start": 5, "generate": 12, "train": 6, "push": 1.6, "end": 1, "other": 0.4}
    assert shares == {name: seconds * S for name, seconds in expected.items()}
    engines, trainers, rewards = found = pools(recorded, 5 * S, 25 * S)
    assert [pool.busy for pool in found] == pytest.approx([10.8 * S, 5.6 * S, 0.4 * S])
    assert (engines.name, engines.push, engines.idle) == ("engines", 1.2 * S, 8 * S)
    assert (trainers.name, trainers.push, rewards.total) == ("trainers", 1.2 * S, 20 * S)
    Process(run, "engine-actor-1", 1).span("pause", 14.1, 14.2)
    assert pools(read_attempt(run, 1), 5 * S, 25 * S)[0].name == "engines (at least one busy)"


def test_the_report_names_what_a_step_is_bound_by(run: Path, capsys: Capsys) -> None:
    assert cli.main(["timeline", str(run)]) == 0
    out = capsys.readouterr().out
    assert "generation (60 %), most of it for sample 27: all wait for it" in out
    assert "slowest rank: trainer-1, 4.80 s of forward and backward, 1.33 times the median" in out
    assert "longest wait for one sample: step 1, sample 27, 10 tokens: 3.50 s after nine of ten had ended" in out
    assert "sum                     26.00  100.0 %" in out


def test_a_slow_rank_is_named_where_training_takes_longest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    driver, trainers = Process(run, "driver"), [Process(run, f"trainer-{rank}") for rank in range(3)]
    driver.span("train", 1, 9, step=1)
    driver.span("step", 0, 10, step=1)
    for rank, trainer in enumerate(trainers):
        trainer.span("forward", 2, 8 if rank == 1 else 4)
    (step,) = summarize_steps(read_attempt(run, 1), {})
    assert step.bound == "training (80 %), trainer-1 is slow"


def test_times_of_another_machine_are_moved_by_the_measured_offset(tmp_path: Path, capsys: Capsys) -> None:
    run = make_run(tmp_path / "run", far_s=-3600.0)
    events = _trace(run)
    names = _process_names(events)
    starts = {names[event["pid"]]: event["ts"] for event in reversed(_spans(events, "train"))}
    assert starts["trainer-0"] == starts["trainer-1"] == 11.1 * S
    assert "2 machines; clocks agree within 0.40 ms" in capsys.readouterr().out


def test_a_clock_that_drifts_is_followed(tmp_path: Path, capsys: Capsys) -> None:
    run = tmp_path / "run"
    driver, far = Process(run, "driver"), Process(run, "trainer-0", 0, boot="boot-2", ahead_s=100.0)
    driver.span("train", 0, 4000)
    for at, drift_ms, error_us in ((0, 0, 300), (1000, 10, 700), (3000, 50, 400)):
        driver.write(["K", "boot-2", driver.micros(at), 100_000_000_000 + drift_ms * 1_000_000, error_us * 1000])
    for at, drift_s in ((500, 0.005), (1000, 0.010), (2000, 0.030), (3500, 0.050)):
        far.span("forward", at + drift_s, at + drift_s + 1)
    recorded = read_attempt(run, 1)
    starts = [span.start for span in recorded.of("trainer-0", "forward")]
    assert starts == [pytest.approx(at * S, abs=2) for at in (500, 1000, 2000, 3500)]
    assert cli.main(["timeline", str(run)]) == 0
    assert "clocks agree within 0.70 ms" in capsys.readouterr().out


def test_a_clock_that_nobody_measured_is_told(tmp_path: Path, capsys: Capsys) -> None:
    run = make_run(tmp_path / "run")
    Process(run, "trainer-2", 2, boot="boot-3", ahead_s=77).span("train", 11, 12, step=1)
    (late,) = [event for event in _spans(_trace(run), "train") if event["dur"] == S]
    assert late["ts"] == 11 * S  # by the wall clocks
    assert "clocks of host of boot-3 were not measured" in capsys.readouterr().out


def test_parts_of_a_run_in_one_process_have_tracks_as_if_they_were_several(tmp_path: Path) -> None:
    run = tmp_path / "run"
    driver = Process(run, "driver")
    driver.span("train", 1, 5, step=1)
    driver.span("train", 1.1, 4.9, "trainer-0", step=1)
    driver.span("forward", 1.2, 2, "megatron")
    driver.span("rollout", 0, 1, "rollouts", step=1)
    driver.span("pause", 5, 5.1, "engine 1-3")
    recorded = read_attempt(run, 1)
    assert [one.process for one in recorded.spans] == ["driver", "trainer-0", "trainer-0", "buffer", "engine-actor-1"]
    assert recorded.processes() == ["buffer", "driver", "engine-actor-1", "trainer-0"]


def test_a_killed_run_ends_within_its_phase(run: Path, capsys: Capsys) -> None:
    driver = Process(run, "driver")  # its lines come after those of make_run, as a torn record's would
    driver.begin("step", 25, step=3)
    driver.begin("generate", 25.1, step=3)
    with _driver(run).open("a") as file:
        file.write('["X","","gener')
    (open_one,) = [event for event in _spans(_trace(run), "generate") if event["args"].get("not ended")]
    assert open_one["ts"] == 25.1 * S
    assert "the record ends in the driver's `generate`" in capsys.readouterr().out


def test_an_engine_s_load_is_read_from_its_log(run: Path) -> None:
    (run / "logs").mkdir()
    assert WALL_NS // 1_000_000_000 == 1_760_000_000, "2025-10-09 08:53:20 UTC"
    (run / "logs" / "engine-0.log").write_text(
        "[2025-10-09 08:53:26.250] Prefill batch, #new-seq: 3, #new-token: 45, #cached-token: 0, token usage: 0.02,"
        " #running-req: 1, #queue-req: 4, cpu graph: False, input throughput (token/s): 3578.33\n"
        "[2025-10-09 08:53:27] Decode batch, #running-req: 20, #token: 512, token usage: 0.10, cpu graph: False,"
        " gen throughput (token/s): 812.50, #queue-req: 0\n"
        "[2025-10-09 09:53:27] Decode batch, #running-req: 9, #token: 1, token usage: 0.10, after the run\n"
    )
    found = {
        (e["name"], e["ts"] / S): e["args"].get(e["name"]) for e in _trace(run) if e["ph"] == "C" and e["pid"] != 6
    }
    expected = {("running", 6.25): 1, ("running", 7.0): 20, ("queued", 6.25): 4, ("kv_used", 7.0): 0.1}
    expected |= {("decoded_tokens_per_s", 7.0): 812.5, ("running", 3607.0): None}
    assert {place: found.get(place) for place in expected} == expected


def test_mistakes_are_told(run: Path, capsys: Capsys) -> None:
    mistakes = {"--steps 4-1": "--steps 4-1", "--attempt 3": "has a record of 1", "--samples -1": "--samples -1"}
    mistakes |= {"--steps 7-9": "--steps 7-9", "--out /proc/no/file": "cannot be written"}
    for flags, said in (mistakes | {"": "has no timeline/"}).items():
        if not flags:
            (run / "timeline").rename(run / "moved")
        assert cli.main(["timeline", str(run), *flags.split()]) == 2
        assert said in capsys.readouterr().err


def _faults(run: Path, capsys: Capsys, said: str = "checked: ") -> str:
    capsys.readouterr()
    code, output = cli.main(["timeline", str(run), "--check"]), capsys.readouterr()
    assert code == (1 if output.err else 0) and (said in output.out) != bool(output.err)
    return output.err


def _rows(run: Path, **changes: Any) -> None:
    """Rows of the two steps, as in the record: each is written 9.9 s after its step begins. `changes`: of both."""
    rows = []
    for step, at in ((1, 5.0), (2, 15.0)):
        times = {"perf/time_generate_s": 5.95, "perf/time_train_s": 2.99, "perf/time_sync_s": 0.78}
        row = {"step": step, "attempt": 1, "time": WALL_NS / 1e9 + at + 9.9, "sync/version": step}
        rows.append(row | times | {"perf/step_time_s": 9.82})
    for name, values in changes.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_check_says_if_there_was_nothing_to_compare(run: Path, capsys: Capsys) -> None:
    row = {"step": 1, "attempt": 1, "time": WALL_NS / 1e9, "train/loss": 1.0}
    assert _faults(run, capsys, "metrics.jsonl has no times to compare") == ""
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert _faults(run, capsys, "metrics.jsonl has no times to compare") == ""
    _rows(run)
    assert _faults(run, capsys, "times agree with metrics.jsonl") == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"perf/time_train_s": (2.99, 3.5)}, "`train` takes 6.00 s in the record and 6.49 s in metrics.jsonl"),
        ({"perf/time_train_s": (2.99, 2.5)}, "`train` takes 6.00 s in the record and 5.49 s in metrics.jsonl"),
        ({"perf/time_sync_s": (0.78, 1.0)}, "`push` takes 1.60 s in the record and 1.78 s in metrics.jsonl"),
    ],
)
def test_the_check_compares_phases_with_the_metrics(changes: dict, said: str, run: Path, capsys: Capsys) -> None:
    _rows(run, **changes)
    assert said in _faults(run, capsys)


@pytest.mark.parametrize("name", ["train", "push"])
def test_the_check_misses_phases_that_are_not_in_the_record(name: str, run: Path, capsys: Capsys) -> None:
    """A phase that had not ended when the record did is not missing: the run was killed, or goes on."""
    _rows(run)
    lines = _driver(run).read_text().splitlines(True)
    _driver(run).write_text("".join(line for line in lines if f'"", "{name}"' not in line))
    fact = "version" if name == "push" else "step"
    assert f"`{name}` of {fact} 1, 2 is not in the record" in _faults(run, capsys)
    driver = Process(run, "driver")
    for step, at in ((1, 5.0), (2, 15.0)):
        driver.begin(name, at, **{fact: step})
    assert f"`{name}` of" not in _faults(run, capsys)


def test_the_check_compares_steps_with_the_wall_clock(run: Path, capsys: Capsys) -> None:
    """By which the rows are written: here the clock of the spans is too slow by a tenth."""
    _rows(run, time=[WALL_NS / 1e9 + at for at in (16.4, 27.4)])
    found = _faults(run, capsys)
    assert "the row of step 2 was written 27.40 s after the run began" in found
    assert "that step from 15.00 s to 25.00 s" in found


def test_the_check_wants_phases_to_fill_the_steps(run: Path, capsys: Capsys) -> None:
    """A fiftieth of the wall time may be between phases, and not a tenth. No metric tells of it here."""
    text = _driver(run).read_text()
    assert '"generate", 15000000, 6000000' in text
    _rows(run)
    assert _faults(run, capsys) == ""
    _driver(run).write_text(text.replace('"generate", 15000000, 6000000', '"generate", 16000000, 5000000'))
    _rows(run, **{"perf/time_generate_s": (5.0, 5.0)})
    assert "phases add up to 8.80 s of the 10.00 s between the first step's row" in _faults(run, capsys)


@pytest.mark.parametrize(("error_ns", "said"), [(400_000, ""), (9_000_000, "known within 9.0 ms, and not within 5")])
def test_the_check_wants_exact_clocks(error_ns: int, said: str, tmp_path: Path, capsys: Capsys) -> None:
    folder = make_run(tmp_path / "far", far_s=3600.0)
    record = _driver(folder).read_text()
    _driver(folder).write_text(record.replace(" 400000]", f" {error_ns}]"))
    assert (said in _faults(folder, capsys)) if said else not _faults(folder, capsys)


def test_a_late_reward_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    buffer = Process(run, "buffer", 2)
    buffer.sample(28, [("turn", 5.1, 5.2, {}), ("reward", 5.2, 10.6, {})])
    recorded = read_attempt(run, 1)
    first, _ = summarize_steps(recorded, steps_of(run, recorded))
    assert first.bound == "generation (60 %), most of it for sample 28: all wait for its reward"


def test_samples_of_steps_without_files_belong_to_the_step_in_which_they_ended(run: Path) -> None:
    """--keep-rollouts has deleted the files of the first steps."""
    recorded = read_attempt(run, 1)
    before = {step: len(courses) for step, courses in steps_of(run, recorded).items()}
    (run / "rollouts" / "step_000001.train.a1.jsonl").unlink()
    assert {step: len(courses) for step, courses in steps_of(run, recorded).items()} == before and before[1] == 20
