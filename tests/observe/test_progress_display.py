"""The progress display: content, width, one panel that is redrawn, fall-backs."""

import io
import re

import pytest
from rich.cells import cell_len

from fusionrl.observe.progress import (
    _ROWS,
    ASCII,
    PHASES,
    UNICODE,
    Progress,
    bar,
    duration,
    number,
    rate,
    sparkline,
    split,
    stacked,
)
from fusionrl.runtime.reporter import _SHOWN
from tests.own_process import wait_until

STEP = {"reward": 0.412, "accuracy": 0.37, "loss": 0.0123, "tokens_per_s": 1234.0, "mismatch": 3.1e-4}
STEP |= {"time_generate_s": 6.0, "time_train_s": 3.0, "time_sync_s": 1.0}


class Stream(io.TextIOWrapper):
    """A stream that says whether it is a terminal."""

    def __init__(self, tty: bool, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def panels(text: str) -> list[str]:
    """The texts of all panels that were drawn, without escape sequences; the first item is what precedes them."""
    return re.sub(r"\r|\x1b\[[\d;]*[A-Za-z]", "", text.replace("\x1b[1A\x1b[2K", "")).split("── fusionrl")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "NO_COLOR": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_panel_shows_the_newest_values_and_stays_below_the_log(terminal: pytest.MonkeyPatch) -> None:
    now, stream = [0.0], Stream(tty=True)
    progress = Progress(200, "rl", stream, refresh_s=0, clock=lambda: now[0])
    progress.status("starting engines")
    now[0] += 100
    for step in range(1, 38):
        now[0] += 12
        progress.update(step, {**STEP, "reward": step / 100})
        progress.print(f"log line {step}")
    progress.update(37, {"eval_accuracy": 0.381})
    panel = panels(stream.text())[-1]
    for expected in ("rl", "37/200", "18%", "0.370", "0.010 to 0.370", "37.0%", "eval 38.1%", "1,234",
                     "mismatch 3.1e-04", "loss 0.012", "12s/step", "generate 60%", "train 30%", "sync 10%",
                     "9m04s", "32m36s left", "starting engines"):  # fmt: skip
        assert expected in panel, f"{expected!r} is missing:\n{panel}"
    assert "▁" in panel and "█" in panel
    assert stream.text().count("\x1b[1A") >= 37 * 7, "each panel erases the lines of the one before"
    assert [line for line in stream.text().splitlines() if "log line" in line][-1].endswith("log line 37")


def test_a_pipeline_that_runs_ahead_shows_ages_and_idle_shares(terminal: pytest.MonkeyPatch) -> None:
    ahead = {"staleness": 0.45, "staleness_max": 2.0, "in_flight": 24.0, "ready": 3.0}
    ahead |= {"engines_idle": 0.05, "trainers_idle": 0.2}
    for values, is_shown in ((STEP | ahead, True), (STEP | {"staleness": 0.0, "engines_idle": 0.4}, False)):
        stream = Stream(tty=True)
        progress = Progress(200, "rl", stream, refresh_s=0)
        progress.update(1, values)
        shown = panels(stream.text())[-1]
        for text in ("staleness 0.450", "max 2", "in flight 24", "ready 3", "engines idle 5.0%", "trainers idle 20.0%"):
            assert (text in " ".join(shown.split())) == is_shown, text
        log = Stream(tty=False)
        Progress(200, "rl", log).update(1, values)
        assert ("stale 0.450" in log.text()) == is_shown


@pytest.mark.parametrize(("encoding", "color"), [("utf-8", True), ("ascii", False)])
@pytest.mark.parametrize("columns", [1, 20, 44, 79, 80, 300])
def test_no_line_is_wider_than_the_terminal(
    terminal: pytest.MonkeyPatch, columns: int, encoding: str, color: bool
) -> None:
    terminal.setenv("COLUMNS", str(columns))
    terminal.setenv("NO_COLOR", "" if color else "1")
    stream = Stream(tty=True, encoding=encoding)
    with Progress(100_000, "reject-sampling", stream, refresh_s=0) as progress:
        for step in range(1, 6):
            progress.update(99_000 + step, {**STEP, "eval_accuracy": 1.0, "tokens_per_s": 123456.7 * step})
            progress.status("a phase with a long name, and 数 wide characters in it " * 3)
        drawn = stream.text()
    assert color == bool(re.search(r"\x1b\[3\dm", drawn))
    plain = re.sub(r"\r|\x1b\[[\d;]*[A-Za-z]", "", drawn)
    assert plain.count("\n") > 30, "drawn to the end"
    assert max(cell_len(line) for line in plain.split("\n")) < max(columns, 2)


def test_the_clock_runs_between_updates_and_the_last_panel_has_no_status(terminal: pytest.MonkeyPatch) -> None:
    stream = Stream(tty=True)
    progress = Progress(10, "sft", stream, refresh_s=0.01)
    progress.update(3, {"loss": 2.5})
    progress.status("saving a checkpoint")
    wait_until(lambda: stream.text().count("saving a checkpoint") > 3)  # redrawn while nothing is reported
    progress.close()
    progress.close()
    last = panels(stream.text())[-1]
    assert re.search(r"loss +2\.500", last) and "saving" not in last
    assert last.endswith("\n"), "the cursor is left below"
    assert "\x1b[?25l" not in stream.text(), "a killed run leaves a visible cursor"


def test_a_log_file_gets_one_aligned_line_a_step(terminal: pytest.MonkeyPatch) -> None:
    now, stream = [0.0], Stream(tty=False)
    with Progress(100, "rl", stream, clock=lambda: now[0]) as progress:
        progress.status("starting engines")
        for step, reward in ((8, 0.5), (9, -0.25), (10, 0.125)):
            now[0] += 10
            for text in ("generating", "training"):
                progress.status(text, recurs=True)
            progress.update(step, {**STEP, "reward": reward})
        for text in ("engine 1 is dead", "engine 1 is back") * 2:
            progress.status(text)
    lines = stream.text().splitlines()
    assert lines[:3] == ["starting engines", "generating", "training"] and "\x1b" not in stream.text()
    assert lines[6:] == ["engine 1 is dead", "engine 1 is back"] * 2, "what happens again is told again"
    assert len({line.index("mismatch") for line in lines[3:6]}) == 1
    assert "step  10/100" in lines[5] and "0.125" in lines[5] and "gen/train/sync 60/30/10%" in lines[5]


def test_a_terminal_that_cannot_redraw_gets_lines(terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("TERM", "dumb")
    stream = Stream(tty=True)
    with Progress(3, "rl", stream) as progress:
        for _ in range(2):
            progress.status("engine lost:\nport 1")
        progress.update(1, {})  # a step without values still counts
        assert stream.text().count("engine lost") == 1 and "1/3" in stream.text()


def test_time_left_ignores_the_start_of_the_engines_and_follows_the_last_steps() -> None:
    now, stream = [1000.0], Stream(tty=False)
    progress = Progress(101, "rl", stream, clock=lambda: now[0])
    now[0] += 1000
    progress.update(1, STEP)
    assert "16m40s left" in stream.text(), "100 steps of the 10 s that the step itself took"
    for step in range(2, 22):
        now[0] += 20
        progress.update(step, STEP)
    assert stream.text().splitlines()[-1].rstrip().endswith("26m40s left"), "80 steps of 20 s"


def test_an_ascii_terminal_gets_ascii(terminal: pytest.MonkeyPatch) -> None:
    stream = Stream(tty=True, encoding="ascii")
    with Progress(10, "rl", stream, refresh_s=0) as progress:
        for step in (1, 2):
            progress.update(step, {**STEP, "reward": step / 2})
        progress.print("Größe")
        for text in ("数", "x" * 500):
            progress.status(text)
    assert all(part in stream.text() for part in ("| ?", "x~", "Gr??e", "#"))


def test_a_closed_terminal_does_not_stop_the_run(terminal: pytest.MonkeyPatch) -> None:
    stream = Stream(tty=True)
    with Progress(10, "rl", stream, refresh_s=0) as progress:
        progress.update(1, STEP)
        stream.close()
        progress.update(2, STEP)
        progress.print("still running")


def test_sparkline_scales_averages_and_survives_flat_and_nan() -> None:
    assert sparkline(range(8), 8) == UNICODE.sparks
    assert sparkline([0, 0, 1, 1], 2) == "▁█", "a long history is averaged, not cut"
    assert sparkline([5.0] * 4, 8) == "▄" * 4
    assert sparkline([0.0, float("nan"), 1.0], 8, ASCII) == "_#"
    assert sparkline([], 8) == sparkline([1.0], 0) == ""


def test_shares_and_bars_add_up() -> None:
    assert sum(stacked([1 / 3, 1 / 3, 1 / 3], 100)) == 100
    assert stacked([0.5, 0.25, 0.25], 8) == [4, 2, 2]
    assert bar(0.999, 10) == ("━" * 9, "╌"), "not full before it is done"
    assert bar(1.0, 10) == bar(7.0, 10) == ("━" * 10, "")
    assert split({"time_generate_s": 3.0, "time_sync_s": 1.0}) == {"generate": 0.75, "sync": 0.25}
    assert split({"time_train_s": 3.0}) == split({"time_train_s": 0.0, "time_sync_s": 0.0}) == {}


def test_numbers_read_well() -> None:
    durations = [duration(value) for value in (0, 7.34, 59.6, 200, 7500, 200_000)]
    assert durations == ["0.0s", "7.3s", "1m00s", "3m20s", "2h05m", "2d07h"]
    numbers = [number(value) for value in (0.0, 0.5, -12.25, 3.1e-4, 2e6, float("nan"))]
    assert numbers == ["0.000", "0.500", "-12.250", "3.1e-04", "2.0e+06", "nan"]
    assert [rate(value) for value in (87.44, 1234.4, 999_949, 1_240_000)] == ["87.4", "1,234", "999,949", "1.24M"]


def test_the_panel_has_a_place_for_each_value_of_a_run() -> None:
    names = {key for row in _ROWS for _, key, _ in row} | {key for _, key, _ in PHASES}
    assert _SHOWN.keys() <= names | {"reward"}
