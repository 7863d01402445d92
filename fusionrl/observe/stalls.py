"""A stalled run: which processes it has here and where each of them is, when to report a phase, and the report.

A process belongs to the run if its standard error is a file in the run's `logs/`, or if it descends from such a
process: a process that may not answer need not be asked for its name.

A phase is late after max(floor, 5 x its median), and then again after pauses that double: after 60 s, 120 s, 240 s, …
One that has never ended has no median; it is given 5 x the floor. The caller passes the time.
"""

import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from fusionrl.base.process import ask_for_stacks
from fusionrl.observe.rollouts import as_ranges

_HEAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_PACKAGE = Path(__file__).parents[1]
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python3[.\d]*)/|^<")
# Of a file, in which a rank waits for others: the name of what it waits in. None: the function's own.
_COLLECTIVES: tuple[tuple[str, str | None], ...] = (
    ("torch/distributed/distributed_c10d.py", None),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "send or receive between stages"),
    ("megatron/core/distributed/param_and_grad_buffer.py", "reduction of gradients"),
    ("megatron/core/tensor_parallel/mappings.py", "tensor-parallel collective"),
)


@lru_cache(maxsize=4096)
def _file_of_package(path: str) -> str | None:
    """Return the part of `path` behind `fusionrl/` if this package has such a file, else None.

    A checkout, or a folder of a user's, may be called fusionrl, too; another node may have the package elsewhere.
    """
    _, is_below, file = f"/{path}".rpartition("/fusionrl/")
    return file if is_below and (_PACKAGE / file).is_file() else None


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Return whether it is Python's own or an installed package's, which is not fusionrl."""
        return not self.is_fusionrl and bool(_LIBRARY.search(self.file))

    @property
    def is_fusionrl(self) -> bool:
        """Return whether the file is one of this package, here or on another node."""
        return _file_of_package(self.file) is not None

    def __str__(self) -> str:
        """Return file, line and function; the file as it is called within fusionrl, or with its folder."""
        file = _file_of_package(self.file) or "/".join(self.file.split("/")[-2:])
        return f"{self.function} ({file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """A thread: its frames, the innermost first."""

    frames: tuple[Frame, ...]

    @property
    def place(self) -> Frame | None:
        """The innermost line of fusionrl or of a user; else the innermost one."""
        return next((frame for frame in self.frames if not frame.is_library), self.frames[0] if self.frames else None)

    @property
    def collective(self) -> str | None:
        """The name of what it waits in for other ranks; None where it does not."""
        for frame in self.frames:
            if not frame.is_library:  # what is outside of it called something that has returned
                return None
            for file, name in _COLLECTIVES:
                if frame.file.endswith(file):
                    # The function that was called from without: "all_reduce", and not what it calls.
                    return name or [inner.function for inner in self.frames if inner.file.endswith(file)][-1]
        return None


def read_stacks(text: str) -> list[Thread]:
    """Return the threads in what a process wrote, less the one that answered; other output is left out."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    answering = "base/process.py"
    return [Thread(tuple(frames)) for frames in threads if answering not in (_file_of_package(f.file) for f in frames)]


# ------------------------------------------------------------------------------------------------ processes
ANSWER_S = 1.0
_PATIENCE_S = 0.5  # a process that has written nothing by then may hold Python's lock
_QUIET_S = 0.05  # a process whose log has not grown for so long has written all
_MOST_BYTES = 1 << 20  # of one process
_POLL_S = 0.01
_DEAD = "dead"
_TROUBLES = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a driver",
    psutil.STATUS_ZOMBIE: _DEAD,
}


@dataclass(frozen=True)
class ProcessState:
    """A process of the run."""

    role: str  # as its log is called: "trainer-3", "buffer", "engine-0"
    pid: int
    host: str
    title: str  # its command line, shortened
    trouble: str  # "stopped by a signal", …; "" for a process that runs or sleeps
    stacks: str  # as it wrote them; "" where it wrote none

    @property
    def thread(self) -> Thread | None:
        """Its main thread: the oldest, which `faulthandler` writes last."""
        threads = read_stacks(self.stacks)
        return threads[-1] if threads else None

    def render(self) -> str:
        """Return it as the file in `logs/` has it."""
        head = f"=== {self.role}: process {self.pid} on {self.host}" + (f", {self.trouble}" if self.trouble else "")
        return f"{head}\n    {self.title}\n{self.stacks.rstrip() or 'it has not answered SIGUSR1'}\n"


def look(logs: Path, answer_s: float = ANSWER_S) -> list[ProcessState]:
    """Return the run's processes on this machine with the folder `logs`, each with its stacks.

    Those that share a log are asked one after the other, so that their stacks do not mix. Each has `answer_s` seconds.
    """
    by_log: dict[Path, list[int]] = defaultdict(list)
    for log, pid in sorted(_processes(logs)):
        by_log[log].append(pid)

    def ask(log: Path) -> list[ProcessState]:
        role = re.sub(r"(\.a\d+)?\.log$", "", log.name)
        states = []
        for pid in by_log[log]:
            stacks = _ask(log, pid, answer_s)
            states.append(ProcessState(role, pid, socket.gethostname(), *_examine(pid), stacks))
        return states

    with ThreadPoolExecutor(max(1, len(by_log))) as pool:
        return [state for states in pool.map(ask, by_log) for state in states]


def _processes(logs: Path) -> Iterable[tuple[Path, int]]:
    """(log, pid) of every process that writes into a log of the folder, itself or by its parents; not of this one."""
    folder = logs.resolve()
    parents: dict[int, int] = {}
    logs_by_pid: dict[int, Path] = {}
    for pid in psutil.pids():
        try:
            parents[pid] = psutil.Process(pid).ppid()
            log = Path(os.readlink(f"/proc/{pid}/fd/2"))
        except (OSError, psutil.Error):  # it has ended, or is another user's
            continue
        if log.parent == folder and log.suffix == ".log":
            logs_by_pid[pid] = log
    parents.pop(os.getpid(), None)
    logs_by_pid.pop(os.getpid(), None)
    for pid in parents:
        above: int | None = pid
        while above is not None and above not in logs_by_pid:
            above = parents.get(above)
        if above is not None:
            yield logs_by_pid[above], pid


def _ask(log: Path, pid: int, answer_s: float) -> str:
    """Ask a process for its stacks; return those that it wrote into its log, "" where it did not answer."""
    start = size = _size(log)
    trouble = _examine(pid)[1]
    if trouble == _DEAD or trouble.startswith("stopped") or not ask_for_stacks(pid):
        return ""
    begun = grown = time.monotonic()
    is_forced = False
    while (now := time.monotonic()) < begun + answer_s:
        if (new_size := _size(log)) > size:
            size, grown = new_size, now
        elif size > start and now - grown > _QUIET_S:
            break
        elif size == start and not is_forced and now - begun > _PATIENCE_S:
            is_forced = ask_for_stacks(pid, is_forced=True)
        time.sleep(_POLL_S)
    return _read(log, start) if size > start else ""


def _read(log: Path, start: int) -> str:
    """Read what was written into a log since `start`, but for lines that are not of stacks."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line for line in text.splitlines() if not line or re.match(r"^(Current t|T)hread 0x|^  ", line))


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _examine(pid: int) -> tuple[str, str]:
    try:
        process = psutil.Process(pid)
        return " ".join(process.cmdline())[:200], _TROUBLES.get(process.status(), "")
    except psutil.Error:
        return "", _DEAD


# ------------------------------------------------------------------------------------------------ late phases
FLOOR_S = 60.0
FACTOR = 5.0


class Phase(NamedTuple):
    """A phase of the driver that has not ended. `since` comes from the same clock as `now`."""

    name: str
    since: float


@dataclass(frozen=True)
class LatePhase:
    """A phase of which to speak."""

    phase: str
    seconds: float  # since it began
    usual_s: float | None  # its median so far; None: no phase of this name has ended yet
    number: int  # of the report about this phase, from 1
    is_last: bool = False  # it has reached --stall-timeout-s: the run ends


@dataclass(frozen=True)
class EndedPhase:
    """A phase that was spoken of, and has ended after some `seconds`."""

    phase: str
    seconds: float


class StallClock:
    """Decides for one phase after the other. It is asked again and again; it never blocks."""

    def __init__(self, floor_s: float = FLOOR_S, timeout_s: float | None = None) -> None:
        """timeout_s  --stall-timeout-s: the run ends with a phase that takes so long"""
        self._floor_s, self._timeout_s = floor_s, timeout_s
        self._phase: Phase | None = None
        self._next_s = 0.0
        self._number = 0

    def look(
        self, now: float, phase: Phase | None, lasted: Mapping[str, Sequence[float]]
    ) -> LatePhase | EndedPhase | None:
        """Return what to speak of now.

        phase   the innermost phase of now; None: none
        lasted  name of a phase → seconds of those that have ended
        """
        usual_s = median(times) if phase is not None and (times := lasted.get(phase.name)) else None
        if phase != self._phase:
            before, was_reported = self._phase, self._number > 0
            self._phase, self._number = phase, 0
            self._next_s = FACTOR * self._floor_s if usual_s is None else max(self._floor_s, FACTOR * usual_s)
            return EndedPhase(before.name, now - before.since) if before is not None and was_reported else None
        if phase is None:
            return None
        seconds = now - phase.since
        is_last = self._timeout_s is not None and seconds >= self._timeout_s
        if seconds < self._next_s and not is_last:
            return None
        self._number += 1
        self._next_s = 2 * seconds
        return LatePhase(phase.name, seconds, usual_s, self._number, is_last)


# ------------------------------------------------------------------------------------------------ the line
_MOST_PLACES = 4
_NUMBERED = re.compile(r"^(?P<group>.*?)[ -](?P<number>\d+)$")


@dataclass(frozen=True)
class EngineLoad:
    """Two looks at an engine, a second apart."""

    name: str
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    fault: str = ""  # why it does not answer; "" where it does

    def __str__(self) -> str:
        if self.fault:
            return f"{self.name} {self.fault}"
        queued = f", {self.waiting} waiting" if self.waiting else ""
        return f"{self.name}: {self.running} running{queued}, {self.tokens_per_s:.0f} tok/s"


def stall_line(
    late: LatePhase,
    waited_for: Sequence[str],
    seen: Sequence[ProcessState] = (),
    *,
    driver: str = "",
    progress: Sequence[str] = (),
    engines: Sequence[EngineLoad] = (),
    sizes: Mapping[str, int] | None = None,
    file: str = "",
) -> str:
    """Return the line about a phase that is late.

    waited_for  names of the calls that the driver waits for: "trainer rank 3", "engine 1: pause"
    driver      where the driver is, for a wait that names no actor
    sizes       of the groups in `waited_for`: "trainer rank" → 8
    """
    usual_time = "the first of its kind" if late.usual_s is None else f"median {seconds(late.usual_s)}"
    parts = [f'"{late.phase}" has taken {seconds(late.seconds)} ({usual_time})']
    if waited_for:
        parts.append("waits for " + join_names(waited_for, sizes or {}))
    elif driver:
        parts.append(f"the driver is in {driver}")
    parts += describe_troubles(seen)
    if meeting := describe_ranks(seen):
        parts.append(meeting)
    parts += progress
    parts += map(str, engines)
    if file:
        parts.append(f"stacks in {file}")
    return "; ".join(parts)


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def join_names(names: Iterable[str], sizes: Mapping[str, int]) -> str:
    """Names with their numbers taken together: "trainer ranks 3, 7 of 8, engine 1: pause"."""
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    other_calls: list[str] = []
    for name in names:
        head, _, rest = name.partition(":")
        if match := _NUMBERED.match(head):
            groups[match["group"], rest].append(int(match["number"]))
        elif name not in other_calls:
            other_calls.append(name)
    texts = []
    for (group, rest), numbers in groups.items():
        size = f" of {sizes[group]}" if group in sizes else ""
        plural = "s" * (len(set(numbers)) > 1)
        texts.append(f"{group}{plural} {as_ranges(numbers)}{size}" + (f":{rest}" if rest else ""))
    return ", ".join(texts + other_calls)


def describe_troubles(seen: Sequence[ProcessState]) -> list[str]:
    """One text for each process that is stopped, dead or blocked in the kernel."""
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for process in seen:
        if process.trouble:
            groups[process.role, process.trouble].append(process.pid)
    texts = []
    for (role, trouble), pids in groups.items():
        verb, which = ("", "") if trouble.startswith("waits") else ("is ", f" (pid {', '.join(map(str, pids))})")
        texts.append(f"{role} {verb}{trouble}{which}")
    return texts


def describe_ranks(seen: Sequence[ProcessState]) -> str:
    """Who of the ranks waits in a collective, and who did not arrive there; "" where no rank waits in one."""
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    away: defaultdict[str, list[int]] = defaultdict(list)
    for process in seen:
        match = _NUMBERED.match(process.role)
        if match is None or match["group"] != "trainer":
            continue
        rank, thread = int(match["number"]), process.thread
        if thread is not None and (collective := thread.collective):
            waiting[f"{collective} of {thread.place}"].append(rank)
        else:
            place = f"in {thread.place}" if thread is not None and thread.place else "silent"
            away[process.trouble or place].append(rank)
    if not waiting:
        return ""

    def ranks(numbers: Sequence[int]) -> str:
        return f"rank{'s' * (len(numbers) > 1)} {as_ranges(numbers)}"

    waits = (f"{ranks(numbers)} wait{'s' * (len(numbers) == 1)} in {place}" for place, numbers in waiting.items())
    here = "; ".join(waits)
    if away:
        places = [f"{ranks(numbers)} ({place})" for place, numbers in list(away.items())[:_MOST_PLACES]]
        more = ", …" * (len(away) > _MOST_PLACES)
        return f"{here}, where {', '.join(places)}{more} did not arrive"
    return here if len(waiting) == 1 else f"the ranks wait in different collectives: {here}"
