"""Real processes give their stacks, also one that blocks Python's lock; one that is stopped holds nobody up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusionrl.base import process
from fusionrl.base.process import answers_with_stacks, ask_for_stacks
from fusionrl.observe.stalls import ProcessState, look, read_stacks
from tests.own_process import wait_until

ANSWERING = "from fusionrl.base.process import answer_with_stacks; answer_with_stacks()\n"
BLOCKED = """
import ctypes
def blocked():
    while True:
        ctypes.PyDLL(None).sleep(60)  # in C, with the interpreter's lock
print("ready", flush=True)
blocked()
"""
SLEEPING = """
import threading, time
def sleeping():
    time.sleep(60)
threading.Thread(target=sleeping, daemon=True).start()
print("ready", flush=True)
sleeping()
"""
BUSY = """
import threading, time
def deep(n):
    exec(compile("def f(x): return [y for y in range(3)]\\nfor i in range(20): f(i)", "made", "exec"), {})
    return 0 if n == 0 else deep(n - 1)
def busy():
    while True:
        deep(20)
for _ in range(3):
    threading.Thread(target=busy, daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""
FORKING = """
import os, time
child = os.fork()
print(child or "ready", flush=True)
time.sleep(60)
"""
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(role, program) -> pid of a process that writes into logs/<role>.a1.log, and is at work."""
    logs, children = tmp_path / "logs", []
    logs.mkdir()

    def begin(role: str, program: str, *, answers: bool = True) -> int:
        log = logs / f"{role}.a1.log"
        with log.open("ab") as file:
            before, source = log.stat().st_size, (ANSWERING if answers else "") + program
            children.append(subprocess.Popen([sys.executable, "-c", source], stdout=file, stderr=file))
        wait_until(lambda: log.stat().st_size > before)
        return children[-1].pid

    yield begin
    for child in children:
        child.kill()
        child.wait()


def _functions(one: ProcessState) -> list[str]:
    return [frame.function for thread in read_stacks(one.stacks) for frame in thread.frames]


def test_everybody_is_found_by_the_log_and_nobody_is_waited_for(start: Start, tmp_path: Path) -> None:
    blocked, stopped = start("trainer-0", BLOCKED), start("trainer-1", SLEEPING)
    first, second = start("engine-0", SLEEPING), start("engine-0", BLOCKED)
    silent = start("router", SLEEPING, answers=False)
    os.kill(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    found = {one.pid: one for one in look(tmp_path / "logs", answer_s=5.0)}
    assert time.monotonic() - begun < 4.0 and set(found) == {blocked, stopped, first, second, silent}
    assert _functions(found[first]).count("sleeping") == 2  # both threads
    assert _functions(found[blocked])[0] == _functions(found[second])[0] == "blocked"  # two that share a log
    state = found[stopped]
    assert (state.role, state.trouble, state.stacks) == ("trainer-1", "stopped by a signal", "")
    assert (found[silent].stacks, os.kill(silent, 0)) == ("", None)  # it has no handler: it was not asked, and lives
    assert not ask_for_stacks(silent) and not ask_for_stacks(2**22 + 1)
    assert "blocked" in found[blocked].render() and "has not answered" in found[silent].render()


def test_a_child_that_may_run_another_program_is_not_asked(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it has its parent's handler; the signal would end the program, as the `lscpu` of a starting engine."""
    monkeypatch.setattr(process, "_YOUNG_S", 600.0)
    parent = start("engine-0", FORKING)
    (child,) = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    try:
        assert answers_with_stacks(child) and not ask_for_stacks(child) and not ask_for_stacks(child, is_forced=True)
        assert ask_for_stacks(parent)
        monkeypatch.setattr(process, "_YOUNG_S", 0.0)
        assert ask_for_stacks(child) and os.kill(child, 0) is None, "a fork that has stayed answers, and lives"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_at_work_survives_the_question(start: Start, tmp_path: Path) -> None:
    """Its threads change their stacks all the time: read without Python's lock, they crash it within 20 questions."""
    pid = start("buffer", BUSY)
    for _ in range(40):
        assert ask_for_stacks(pid)
        time.sleep(0.01)
    (found,) = look(tmp_path / "logs", answer_s=5.0)
    assert (found.pid, found.trouble) == (pid, ""), "it lives"
    assert _functions(found).count("busy") >= 3 and found.thread is not None, "the last answer may come late"
    assert [frame.function for frame in found.thread.frames] == ["<module>"]


MINDED = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
for line in child.stdout:
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
"""


def test_a_process_whose_parent_passes_its_output_on_is_found(start: Start, tmp_path: Path) -> None:
    """As an engine's scheduler, in whose output the parent hides the key."""
    program = MINDED.replace("sys.argv[1]", repr(ANSWERING + BLOCKED))
    minder = start("engine-0", program, answers=False)
    found = {one.pid: one for one in look(tmp_path / "logs", answer_s=5.0)}
    (child,) = set(found) - {minder}
    assert found[child].role == "engine-0" and _functions(found[child])[0] == "blocked"
    os.kill(child, signal.SIGSTOP)
    assert {one.pid: one.trouble for one in look(tmp_path / "logs")}[child] == "stopped by a signal"
    os.kill(child, signal.SIGKILL)
