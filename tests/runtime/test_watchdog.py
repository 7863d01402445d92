"""The watchdog of a driver whose main thread waits: it speaks, writes the stacks, and ends the wait. Without Ray."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.observe import spans
from fusionrl.observe.stalls import EngineLoad, LatePhase, ProcessState
from fusionrl.runtime import watchdog as watchdog_module
from fusionrl.runtime.watchdog import Stalled, Watchdog, are_trainers_to_blame
from fusionrl.weights.push import Push
from fusionrl.weights.remote_calls import LocalRef, waited_for, waiting
from tests.own_process import wait_until


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
    broken = Mock(side_effect=OSError("the Buffer is gone"))
    run = probes(progress=broken, engines=lambda: [EngineLoad("engine 0", 12, 0, 0.0)])
    with Watchdog(logs, 2, run, floor_s=0.1, timeout_s=2.0) as watchdog:
        os.kill(os.getpid(), watchdog_module._WAKE_SIGNAL)  # of another program
        assert watchdog.ended_by(KeyboardInterrupt()) is None, "the user's own"
        with pytest.raises(KeyboardInterrupt) as raised:
            stuck_in_a_push()
        error = watchdog.ended_by(raised.value)
    assert isinstance(error, Stalled)
    assert re.fullmatch(
        r'"push" has taken [\d.]+ s \(the first of its kind\); waits for engines 0-1: pause; engine 0: 12 running,'
        rf" 0 tok/s; stacks in {logs}/stall-\d\.a2\.txt; --stall-timeout-s 2",
        str(error),
    )
    files = sorted(logs.glob("stall-*.a2.txt"))
    assert len(files) >= 2  # the first after half a second
    text = files[0].read_text()
    main, _, others = text.partition("thread watchdog\n")
    assert "stuck_in_a_push" in main and "in _watch" in others
    assert caplog.text.count('"push" has taken') == len(files)
    assert watchdog.ended_by(KeyboardInterrupt()) and watchdog.ended_by(ValueError("another")) is None


@pytest.mark.parametrize(
    ("waits", "troubles", "expected"),
    [
        (["trainer rank 0", "trainer rank 1"], {}, True),  # a collective that hangs
        (["trainer rank 0"], {"trainer-1": "stopped by a signal"}, True),
        (["trainer rank 0"], {"buffer": "waits for a disk or a driver"}, False),
        (["critic rank 1"], {"reward-worker-3": "dead"}, True),  # which has not been collected
        (["trainer 1: push_weights"], {}, False),  # it may wait for an engine
        (["trainer 1: push_weights"], {"trainer-1": "stopped by a signal"}, True),
        (["trainer rank 0", "engine 1: pause"], {}, False),
        ([], {"trainer-1": "stopped by a signal"}, False),
    ],
)
def test_trainers_are_to_blame_where_no_other_process_is(
    waits: list[str], troubles: dict[str, str], expected: bool
) -> None:
    seen = [ProcessState(role, 7, "host", "", trouble, "") for role, trouble in troubles.items()]
    assert are_trainers_to_blame(waits, seen) is expected


@pytest.mark.parametrize("part", ["from_memory", "of_adapters", "by_disk"])
def test_trainers_that_wait_in_a_push_are_not_to_blame(part: str) -> None:
    """The names that a push gives its waits are those that tell it."""
    called, never = threading.Event(), LocalRef[Any](Future())

    def call(*arguments: object) -> LocalRef[Any]:
        called.set()
        return never

    trainer: Any = Mock()
    for name in ("prepare_push", "push_weights", "push_adapters", "write_weights"):
        getattr(trainer, name).remote = call
    push = Push([trainer, trainer], [], 3, timeout_s=60.0)
    ways: dict[str, Callable[[], object]] = {
        "from_memory": lambda: push.from_memory([], "broadcast", "retract"),
        "of_adapters": push.of_adapters,
        "by_disk": lambda: push.by_disk(None, "retract", keep_files=False),
    }
    with ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(ways[part])
        assert called.wait(30)
        wait_until(lambda: bool(waited_for()))
        waits = [str(name) for name in waited_for()]
        assert waits and all(name.startswith("trainer ") for name in waits)
        assert not are_trainers_to_blame(waits, [])
        never.future().set_exception(RuntimeError("the end"))
        assert "the end" in str(pushing.exception(30))


def test_trainers_that_stall_are_ended_and_the_run_is_not(logs: Path) -> None:
    ended = threading.Event()
    lines: list[str] = []

    def end(line: str) -> bool:
        lines.append(line)
        ended.set()
        return True

    with Watchdog(logs, 1, probes(), floor_s=0.1, timeout_s=0.5, end_trainers=end) as watchdog:
        with spans.phase("train"), waiting(lambda: ["trainer rank 1"]):
            assert ended.wait(60.0)
        assert watchdog.verdict is None
    assert "waits for trainer rank 1" in lines[0] and lines[0].endswith("--stall-timeout-s 0.5")


def test_trainers_that_were_ended_have_time_to_be_missed(logs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As much again, from their end: Ray learns late of a death on another node."""
    ended: list[float] = []
    with Watchdog(
        logs, 1, probes(), floor_s=0.1, timeout_s=1.0, end_trainers=lambda line: not ended.append(time.monotonic())
    ) as watchdog:
        with pytest.raises(KeyboardInterrupt), spans.phase("train"), waiting(lambda: ["trainer rank 1"]):
            threading.Event().wait(60.0)
        assert watchdog.verdict is not None and len(ended) == 1
        assert time.monotonic() - ended[0] >= 1.0


def test_a_phase_that_was_spoken_of_ends(logs: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Watchdog(logs, 1, probes(), floor_s=0.05) as watchdog:
        stuck_in_a_push(lambda: '"push" has taken' in caplog.text)
        with spans.phase("step"):
            with spans.phase("train"):
                pass
            wait_until(lambda: '"step, between its phases" has taken' in caplog.text, 60.0)
        assert watchdog.verdict is None
    assert caplog.messages[0].startswith('"push" has taken')
    assert any(re.fullmatch(r'"push" has ended after [\d.]+ s', text) for text in caplog.messages)


def test_the_line_comes_where_no_file_can_be_written_or_it_cannot_be_made(logs: Path, caplog: Any) -> None:
    with Watchdog(logs / "gone", 1, probes(), floor_s=0.02):
        stuck_in_a_push(lambda: "no file" in caplog.text)
    assert "no file (No such file or directory)" in caplog.text

    sizes = Mock(side_effect=RuntimeError("dictionary changed size during iteration"))
    with Watchdog(logs, 1, probes(sizes=sizes), floor_s=0.02, timeout_s=0.2) as watchdog:
        with pytest.raises(KeyboardInterrupt) as raised:
            stuck_in_a_push()
        error = watchdog.ended_by(raised.value)
    assert '"push" has taken' in str(error) and "dictionary changed size" in str(error)


def test_the_inner_wait_is_the_one_that_counts() -> None:
    with waiting(lambda: ["the Buffer"]):
        with waiting(lambda: ["engine 1"]):
            assert waited_for() == ["engine 1"]
        with waiting(list):
            assert waited_for() == ["the Buffer"]
    assert waited_for() == []


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
        wait_until(lambda: "so far" in caplog.text, 60.0)
        time.sleep(0.1)
        assert watchdog.verdict is None


def test_the_line_of_a_path_with_a_comma_and_every_thread_s_stack(logs: Path) -> None:
    name = "/runs, mine/fusionrl/runtime/loops.py"
    scope: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(compile("def wait(call):\n    call()\n", name, "exec"), scope)
    lines: list[str] = []
    watchdog = Watchdog(logs, 1, probes())

    def reported_by_a_thread() -> None:
        lines.append(watchdog.report(LatePhase("train", 9.0, None, 1))[2])

    def ask() -> None:
        asker = threading.Thread(target=reported_by_a_thread, name="asker")
        asker.start()
        asker.join()

    scope["wait"](ask)
    assert "wait (runtime/loops.py:2)" in lines[0]
    text = (logs / "stall-1.a1.txt").read_text()
    assert text.index("thread MainThread") < text.index("thread asker") < text.index("in reported_by_a_thread")
