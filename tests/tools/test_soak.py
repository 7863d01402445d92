"""tools/soak.py: what it takes for a leak, what it sees of a process, and a real run with a leak in a reward."""

import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import soak

    return soak


def series_of(value: Any, num: int = 400) -> list[tuple[int, float]]:
    """2,000 steps; `value` of a step, with noise of half a MiB that lasts for 20 samples."""
    rng, noise = random.Random(1), 0.0
    rows = []
    for step in range(0, 2000, 2000 // num):
        noise = 0.95 * noise + rng.gauss(0, 0.15)
        rows.append((step, value(step) + noise))
    return rows


@pytest.mark.parametrize(
    ("value", "grows"),
    [
        (lambda step: 300.0, False),
        (lambda step: 300.0 - step / 100, False),
        (lambda step: 400.0 - 100 * math.exp(-step / 150), False),  # caches that fill
        (lambda step: 300.0 + 40.0 * (step > 900), False),  # once, and never again
        (lambda step: 300.0 + step / 100, True),
        (lambda step: 300.0 + 8 * (step // 250), True),  # in steps, as an allocator asks for memory
    ],
)
def test_what_grows(tool: Any, value: Any, grows: bool) -> None:
    trend, found = tool.judge(series_of(value), 1.0)
    assert found == grows, trend


def test_a_constant_figure_has_no_slope(tool: Any) -> None:
    assert tool.judge([(step, 7.0) for step in range(100)], 1.0)[0] == tool.Trend(7.0, 7.0, 0.0, 0.0)


def test_one_more_thread_in_a_short_run_is_no_growth(tool: Any) -> None:
    steps = [look / 5 for look in range(300)]
    once = [(step, 25.0 + (step > 47)) for step in steps]
    trend, grows = tool.judge(once, 1.0)
    assert trend.is_growth and trend.slope > 1.0 and not grows
    assert tool.judge([(step, 25.0 + step // 10) for step in steps], 1.0)[1]


LEAK = """
import socket, sys, threading
kept = []
for line in sys.stdin:
    if line.strip() == "grow":
        kept += [b"x" * 3_000_000, open(sys.argv[0] if sys.argv[0] else "/dev/null"), socket.socket()]
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
    print("done", flush=True)
"""


def test_every_figure_of_a_process_is_seen(tool: Any, tmp_path: Path) -> None:
    """Of two processes the one that leaks is named, with each figure; the other is not."""
    program = tmp_path / "leak.py"
    program.write_text(LEAK)
    leaky, fine = (
        subprocess.Popen([sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    try:
        samplers = [
            tool.Sampler(process.pid, "no token", tmp_path / name) for process, name in ((leaky, "a"), (fine, "b"))
        ]
        for step in range(1, 41):
            for process, word in ((leaky, "grow"), (fine, "stay")):
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(f"{word}\n")
                process.stdin.flush()
                process.stdout.readline()
            for sampler in samplers:
                sampler.sample(step)
    finally:
        for process in (leaky, fine):
            process.kill()
            process.communicate()
    table, growing = tool.report(samplers[0].series, list(tool.TOLERANCES), ["driver"])
    figures = {text.split(": ")[1].split()[0] for text in growing}
    assert figures == {"pss_mib", "rss_mib", "descriptors", "threads", "connections"}, growing
    assert all(text.startswith("driver: ") for text in growing) and "| driver |" in table
    # The share of a page that two processes have changes with the other one.
    judged = [figure for figure in tool.TOLERANCES if figure != "pss_mib"]
    assert tool.report(samplers[1].series, judged, ["driver"])[1] == []


def test_a_run_that_was_hardly_looked_at_does_not_pass(tool: Any) -> None:
    series = {(f"{name} x 7", "threads"): series_of(lambda step: 9.0, 40) for name in tool._WATCHED}
    assert tool.report(series, ["threads"])[1] == []
    del series["router x 7", "threads"]
    assert tool.report(series, ["threads"])[1] == ["router: no process of this name lasted long enough"]
    few = {key: values[::2] for key, values in series.items()}
    assert tool.report(few, ["threads"])[1][0].startswith("20 looks at the run are too few")


REWARD = """
KEPT = []
async def reward(args, sample, **kwargs):
    KEPT.append(open("/dev/null"))
    return float(len(sample.response) % 3)
"""


@pytest.mark.e2e
def test_a_leak_in_a_run_is_found(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Descriptors that a reward keeps open are the only ones that grow, and no file, thread or process does.

    A run of a few steps is too short for memory, and for what fills meanwhile: under load connections to the router
    still come, at most one for each of the 16 requests of a step, and threads. What leaks in each step rises by 40 and
    more. --keep-rollouts keeps the files of the newest steps and of those since the newest checkpoint.
    """
    (tmp_path / "leak.py").write_text(REWARD)
    flags = ["--custom-rm-path", f"{tmp_path / 'leak.py'}:reward", "--keep-rollouts", "3", "--save-interval", "4"]
    figures = ["descriptors", "threads", "connections", "files", "processes"]
    words = [str(tmp_path), "--steps", "60", "--interval", "0.2", "--judge", *figures, "--", *flags]
    assert tool.main(words) == 1
    said = capsys.readouterr().err
    growing = re.findall(r"^(.*: (\w+) grows: (\S+) → (\S+),.*)$", said, re.MULTILINE)
    assert len(growing) == said.count(" grows: ")
    fills = ("descriptors", "connections", "threads")
    lines = [text for text, figure, first, last in growing if figure not in fills or float(last) - float(first) > 16]
    assert len(lines) == 1 and lines[0].startswith("buffer") and ": descriptors grows: " in lines[0], said
    kept = {int(path.name.split("_")[1].split(".")[0]) for path in (tmp_path / "run" / "rollouts").glob("*.train.*")}
    assert kept == {58, 59, 60}
