"""Commands that look at a run of 100,000 steps take seconds of a core. Once curves took 42 s here, and diff 30 s."""

import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from fusionrl import cli
from fusionrl.observe.curves import LOSS, MISMATCH, REWARD, TOKENS, draw_curves
from fusionrl.observe.metrics import next_attempt, read_lines, read_metrics
from fusionrl.observe.rollouts import RolloutWriter
from tests.clock import here_s

NUM_STEPS = 100_000
OTHERS = [f"rollout/adapter/{name}/raw_reward" for name in "abcdefgh"]  # names that a pattern of the glossary describes


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two equal runs, but for the times and the last step."""
    folders = [tmp_path_factory.mktemp(name) for name in "ab"]
    for place, folder in enumerate(folders):
        with (folder / "metrics.jsonl").open("wb") as file:
            for step in range(1, NUM_STEPS + 1):
                numbers = {name: step / 3 + number for number, name in enumerate([REWARD, LOSS, MISMATCH, *OTHERS])}
                numbers |= {TOKENS: float(step + place), "perf/step_time_s": 0.5}
                if step == NUM_STEPS:
                    numbers[LOSS] += place
                line = {"step": step, "attempt": 1, "time": 1.7e9 + step, **numbers}
                file.write(orjson.dumps(line) + b"\n")
        (folder / "config.json").write_text("{}")
        (folder / "run.lock").touch()
        RolloutWriter(folder).write(NUM_STEPS - 1, 1, [{"index": 0, "reward": 1.0, "prompt": "a", "response": "b"}])
    return folders


def command(*words: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main([str(word) for word in words])
    return printed.getvalue()


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of processor time: the machine may be busy."""
    start = time.process_time()
    call()
    return time.process_time() - start


def test_reading(runs: list[Path]) -> None:
    assert seconds_of(lambda: read_metrics(runs[0])) < here_s(5)
    assert seconds_of(lambda: next_attempt(runs[0])) < here_s(5)
    assert seconds_of(lambda: read_lines(runs[0])) < here_s(5)


def test_show_and_report(runs: list[Path]) -> None:
    assert seconds_of(lambda: command("show", runs[0])) < here_s(2)
    assert seconds_of(lambda: command("report", runs[0])) < here_s(4)


def test_curves(runs: list[Path], tmp_path: Path) -> None:
    rows = read_metrics(runs[0])
    assert seconds_of(lambda: draw_curves(rows, tmp_path / "curves.png", "long")) < here_s(10)


def test_view(runs: list[Path], tmp_path: Path) -> None:
    assert seconds_of(lambda: command("view", runs[0], "--html", tmp_path / "view.html")) < here_s(10)


TIMELINE_STEPS = 2_000


def test_timeline(tmp_path: Path) -> None:
    """Of 2,000 steps: each step looks at its own spans alone."""
    (tmp_path / "timeline").mkdir()
    header = {"attempt": 1, "pid": 1, "host": "a", "boot": "b", "mono_ns": 0, "wall_ns": 0, "utc_offset_s": 0}
    phases = ["generate", "train", "columns", "measure", "push", "record"]
    lines = {name: [orjson.dumps(header | {"process": name})] for name in ("driver", "buffer", "engine-actor-0")}
    for step in range(1, TIMELINE_STEPS + 1):
        at = step * 1000
        for number, name in enumerate(phases):
            lines["driver"].append(orjson.dumps(["X", "", name, at + 100 * number, 90, {}]))
        lines["driver"].append(orjson.dumps(["X", "", "step", at, 900, {"step": step}]))
        lines["buffer"].append(orjson.dumps(["X", "rollouts", "rollout", at, 90, {"step": step}]))
        for index in range(2):
            parts = [["turn", at + 1, 50 + index, {}], ["reward", at + 60, 5, {}]]
            lines["buffer"].append(orjson.dumps(["S", at, 80, {"index": 2 * step + index}, parts]))
        for name, start in (("pause", 400), ("resume", 450)):
            lines["engine-actor-0"].append(orjson.dumps(["X", "", name, at + start, 10, {}]))
    for name, records in lines.items():
        (tmp_path / "timeline" / f"{name}.a1.jsonl").write_bytes(b"\n".join(records) + b"\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run.lock").touch()
    assert seconds_of(lambda: command("timeline", tmp_path)) < here_s(12)


def test_diff(runs: list[Path]) -> None:
    def compare() -> None:
        assert f"the runs part at step {NUM_STEPS}" in command("diff", *runs)

    assert seconds_of(compare) < here_s(10)
