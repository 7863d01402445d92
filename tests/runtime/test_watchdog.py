"""The watchdog of a driver whose main thread waits: it speaks, writes the stacks, and ends the wait. Without Ray."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.base.pending_calls import waited_for, waiting
from fusionrl.observe import spans
from fusionrl.observe.stalls.message import EngineLoad
from fusionrl.observe.stalls.thresholds import LatePhase
from fusionrl.runtime.actor_registry import ActorRegistry
from fusionrl.runtime.watchdog import Stalled, Watchdog


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """The run's folder `logs`; this process records its phases beside it."""
    (tmp_path / "logs").mkdir()
    spans.record_to(tmp_path, "driver", 1)
    yield tmp_path / "logs"
    spans.stop_recording()


def probes(**functions: Callable[[], Any]) -> Any:
    """Of a run without actors, but for some functions."""
    without = {"name_of": lambda reference: "", "sizes": dict, "engines": list, "progress": list, "elsewhere": list}
    return SimpleNamespace(**without | functions)


def stuck_in_a_push(is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait as a push does, for answers that do not come; for a minute at most."""
    deadline = time.monotonic() + 60.0
    with spans.phase("push", version=3), waiting(lambda: ["engine 1: pause", "engine 0: pause"]):
        while not is_over() and time.monotonic() < deadline:
            threading.Event().wait(0.05)


def test_a_wait_is_told_and_ended(logs: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[str]:
        raise OSError("the Buffer is gone")

    run = probes(progress=broken, engines=lambda: [EngineLoad("engine 0", 12, 0, 0.0)])
    with Watchdog(logs, 2, run, floor_s=0.1, timeout_s=4.0) as watchdog:
        with pytest.raises(KeyboardInterrupt) as raised:
            stuck_in_a_push()
        error = watchdog.ended_by(raised.value)
    assert isinstance(error, Stalled)
    assert re.fullmatch(
        r'"push" has taken [\d.]+ s \(the first of its kind\); waits for engines 0-1: pause; engine 0: 12 running,'
        rf" 0 tok/s; stacks in {logs}/stall-\d\.a2\.txt; --stall-timeout-s 4",
        str(error),
    )
    files = sorted(logs.glob("stall-*.a2.txt"))
    assert len(files) >= 2  # the first after half a second
    text = files[0].read_text()
    main, _, others = text.partition("thread watchdog\n")
    assert "stuck_in_a_push" in main and "in _watch" in others
    assert caplog.text.count('"push" has taken') == len(files)
    assert watchdog.ended_by(KeyboardInterrupt()) and watchdog.ended_by(ValueError("another")) is None


def test_a_phase_that_was_spoken_of_ends(logs: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Watchdog(logs, 1, probes(), floor_s=0.05) as watchdog:
        stuck_in_a_push(lambda: '"push" has taken' in caplog.text)
        with spans.phase("step"):
            with spans.phase("train"):
                pass
            deadline = time.monotonic() + 60.0
            while '"step, between its phases" has taken' not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.05)
        assert watchdog.verdict is None
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith('"push" has taken') and any(
        text.startswith('"step, between its phases" has taken') for text in texts
    )
    assert any(re.fullmatch(r'"push" has ended after [\d.]+ s', text) for text in texts)


def test_an_interrupt_of_the_user_is_his_own(logs: Path) -> None:
    with Watchdog(logs, 1, probes()) as watchdog:
        assert watchdog.ended_by(KeyboardInterrupt()) is None


def test_the_line_comes_where_no_file_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spans.record_to(tmp_path, "driver", 1)
    try:
        with Watchdog(tmp_path / "gone", 1, probes(), floor_s=0.02):
            stuck_in_a_push(lambda: "no file" in caplog.text)
    finally:
        spans.stop_recording()
    assert "no file (No such file or directory)" in caplog.text


def test_the_inner_wait_is_the_one_that_counts() -> None:
    with waiting(lambda: ["the Buffer"]):
        with waiting(lambda: ["engine 1"]):
            assert waited_for() == ["engine 1"]
        with waiting(list):
            assert waited_for() == ["the Buffer"]
    assert waited_for() == []


def test_the_signal_that_wakes_the_driver_ends_no_other_run(logs: Path) -> None:
    from fusionrl.runtime.watchdog import _WAKE_SIGNAL

    with Watchdog(logs, 1, probes()):
        os.kill(os.getpid(), _WAKE_SIGNAL)
        time.sleep(0.05)


def test_a_phase_that_ends_while_its_line_is_made_ends_no_run(logs: Path, caplog: pytest.LogCaptureFixture) -> None:
    is_asked, has_ended = threading.Event(), threading.Event()

    def progress() -> list[str]:
        is_asked.set()
        assert has_ended.wait(60.0)
        return ["so far"]

    with Watchdog(logs, 1, probes(progress=progress), floor_s=0.5, timeout_s=0.2) as watchdog:
        with spans.phase("save"):
            assert is_asked.wait(60.0)
        has_ended.set()
        deadline = time.monotonic() + 60.0
        while "so far" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert "so far" in caplog.text and watchdog.verdict is None


def test_a_line_that_cannot_be_made_ends_the_run_all_the_same(logs: Path) -> None:
    def sizes() -> dict[str, int]:
        raise RuntimeError("dictionary changed size during iteration")

    with Watchdog(logs, 1, probes(sizes=sizes), floor_s=0.1, timeout_s=0.5) as watchdog:
        with pytest.raises(KeyboardInterrupt) as raised:
            stuck_in_a_push()
        error = watchdog.ended_by(raised.value)
    assert '"push" has taken' in str(error) and "dictionary changed size" in str(error)


def test_the_line_of_a_path_with_a_comma_and_every_thread_s_stack(logs: Path) -> None:
    name = "/runs, mine/fusionrl/runtime/loops.py"
    scope: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(compile("def wait(call):\n    call()\n", name, "exec"), scope)
    done = threading.Event()

    def sleeping_beside() -> None:
        done.wait(60.0)

    beside = threading.Thread(target=sleeping_beside, name="beside")
    beside.start()
    lines: list[str] = []
    watchdog = Watchdog(logs, 1, probes())

    def ask() -> None:
        asker = threading.Thread(target=lambda: lines.append(watchdog.report(LatePhase("train", 9.0, None, 1))))
        asker.start()
        asker.join()

    try:
        scope["wait"](ask)
    finally:
        done.set()
    assert "wait (runtime/loops.py:2)" in lines[0]
    text = (logs / "stall-1.a1.txt").read_text()
    assert "thread beside" in text and "in sleeping_beside" in text
    assert text.index("thread MainThread") < text.index("thread beside")


def test_members_may_be_added_while_they_are_counted(tmp_path: Path) -> None:
    registry: Any = ActorRegistry()
    registry.add("engine 0", None, tmp_path)
    for _ in registry:
        registry.add("engine 1", None, tmp_path)
    assert [member.name for member in registry] == ["engine 0", "engine 1"]
