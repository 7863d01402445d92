"""Spans: the record of when a process did which part of its work, as `fusionrl timeline` shows it.

A process calls `record_to` once. From then on each of its modules says where its time goes:

    with phase("train", step=3):              # some of them a step; others see at once that it started
        with span("forward", micro_batch=0):  # many a step; written when it has ended
            ...
    @phase("offload")                         # or a whole function
    note("decode", start_ns, end_ns, lane="sample 17")   # work that overlaps with other work of its thread (asyncio)
    count("memory", allocated_gb=3.1)                     # a curve

    with course(index=17, group=4) as facts:              # the course of a sample: one record for all of it
        part("queue", start_ns)                           # by whatever runs within the block, tasks of asyncio included
        facts["status"] = "completed"

Without `record_to` all of these do nothing. No span for a single token: a record costs some microseconds.
"""

import atexit
import logging
import os
import re
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import orjson

logger = logging.getLogger(__name__)

# The file, `<run>/timeline/<process>.a<attempt>.jsonl`, is only appended to. Its first line names the process and has
# its clocks; times after it are microseconds of the monotonic clock since then:
#
#     {"process": "trainer-0", "attempt": 1, "pid": 71, "host": "n1", "boot": "…", "mono_ns": …, "wall_ns": …}
#     ["B", lane, name, start, facts]             a phase started
#     ["X", lane, name, start, duration, facts]   a phase or a span has ended; that of a phase is written at once, too
#     ["C", name, time, {series: number}]         a curve
#     ["S", start, duration, facts, parts]        the course of a sample; a part is [name, start, duration, facts]
#     ["K", boot, time, offset_ns, error_ns]      the clock of another machine minus ours, as measured then
#
# Processes of one machine (one boot) share the monotonic clock, so their times agree by themselves. For another machine
# the driver measures the offset by round trips (`measure_offset`).
FOLDER, OFF_VARIABLE = "timeline", "FUSIONRL_TIMELINE"
_FLUSH_LINES, _FLUSH_S = 200, 2.0
_ROUND_TRIPS = 5
_MOST_LASTED = 50  # phases of one name that are remembered
_FAILED_IN = "fusionrl_failed_in"  # attribute of an error

Fact = str | int | float
_Part = tuple[str, int, int, Mapping[str, Fact]]
_parts: ContextVar[list[_Part] | None] = ContextVar("parts of a sample", default=None)

REWARDS = "rewards"  # the lane of what is scored for several samples at once
_recorder: "Recorder | None" = None


@dataclass(frozen=True, eq=False)
class OpenSpan:
    """A span that has not ended. `start_ns` comes from the monotonic clock."""

    lane: str
    name: str
    start_ns: int
    facts: Mapping[str, Fact]
    is_phase: bool


class Place(NamedTuple):
    """The innermost phase that an error left, the step that it belonged to, and when (seconds since 1970)."""

    phase: str
    step: int | None
    time_s: float


class MainPhases(NamedTuple):
    """Phases of a process's main thread."""

    open: OpenSpan | None  # the innermost one that has not ended
    ended_ns: int  # when the last one ended
    lasted: Mapping[str, Sequence[float]]  # name → seconds of the last ones that have ended


class Recorder:
    """Appends the records of one process to its file. Errors of the disk end the recording, never the run."""

    def __init__(self, path: Path, process: str, attempt: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        self._lock = threading.Lock()
        self._open: list[OpenSpan] = []  # phases of the main thread, the outer ones first
        self._lasted: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=_MOST_LASTED))
        self._ended_ns = 0  # of the last phase of the main thread
        self.start_ns = self._flushed_ns = time.monotonic_ns()
        header = {"process": process, "attempt": attempt, "pid": os.getpid(), "host": socket.gethostname()}
        header |= {"boot": boot_id(), "mono_ns": self.start_ns, "wall_ns": time.time_ns()}
        header["utc_offset_s"] = time.localtime().tm_gmtoff  # logs of this machine are in its local time
        self._lines = [orjson.dumps(header)]
        self._flush()

    def begin(self, name: str, facts: Mapping[str, Fact], is_phase: bool, lane: str | None = None) -> OpenSpan:
        if lane is None:
            thread = threading.current_thread()
            lane = "" if thread is threading.main_thread() else thread.name
        span = OpenSpan(lane, name, time.monotonic_ns(), facts, is_phase)
        if is_phase:
            if not lane:
                with self._lock:
                    self._open.append(span)
            self.add(["B", lane, name, (span.start_ns - self.start_ns) // 1000, facts], at_once=True)
        return span

    def end(self, span: OpenSpan) -> None:
        now = time.monotonic_ns()
        if span.is_phase and not span.lane:
            with self._lock:
                self._open.remove(span)
                self._lasted[span.name].append((now - span.start_ns) / 1e9)
                self._ended_ns = now
        self.add(["X", span.lane, span.name, *self.extent(span.start_ns, now), span.facts], at_once=span.is_phase)

    def note_clock(self, boot: str, offset_ns: int, error_ns: int) -> None:
        """Record the clock of another machine, as `measure_offset` found it now."""
        self.add(["K", boot, (time.monotonic_ns() - self.start_ns) // 1000, offset_ns, error_ns], at_once=True)

    def main_phases(self) -> MainPhases:
        """Return what the main thread is at, and how long it was at such before."""
        with self._lock:
            lasted = {name: tuple(times) for name, times in self._lasted.items()}
            return MainPhases(self._open[-1] if self._open else None, self._ended_ns, lasted)

    def close(self) -> None:
        """Write what is still in memory, and record nothing more."""
        with self._lock:
            self._flush()
            self.abandon()

    def abandon(self) -> None:
        """Record nothing more, and forget what is in memory: in a fork of the process."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def extent(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return start and duration in microseconds; what nests in nanoseconds nests in these as well."""
        start = (start_ns - self.start_ns) // 1000
        return start, max(0, (end_ns - self.start_ns) // 1000 - start)

    def add(self, record: list[object], at_once: bool = False) -> None:
        try:
            line = orjson.dumps(record, default=str)
        except TypeError:  # a fact of a user's (a sample's index, say) that JSON cannot hold
            return
        with self._lock:
            self._lines.append(line)
            is_due = len(self._lines) >= _FLUSH_LINES or time.monotonic_ns() - self._flushed_ns > _FLUSH_S * 1e9
            if at_once or is_due:
                self._flush()

    def _flush(self) -> None:
        lines, self._lines, self._flushed_ns = self._lines, [], time.monotonic_ns()
        if not lines or self._file < 0:
            return
        data = b"\n".join(lines) + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:  # a full disk: a run does not end for its timeline
            self.abandon()


def record_to(run_dir: Path | str, process: str, attempt: int) -> None:
    """Let this process record its spans in a run's folder, under its name: "driver", "trainer-0", …

    Where the file cannot be written the log has a warning, and nothing is recorded; nor with FUSIONRL_TIMELINE=0.
    """
    global _recorder
    stop_recording()
    if os.environ.get(OFF_VARIABLE) == "0":
        return
    path = Path(run_dir, FOLDER, f"{process}.a{attempt}.jsonl")
    try:
        _recorder = Recorder(path, process, attempt)
    except OSError as error:
        logger.warning("this process is not in the timeline: %s: %s", path, error.strerror)


def record_beside(log: Path | str) -> None:
    """The same of a process with the log `<run>/logs/<process>.a<attempt>.log`."""
    if match := re.fullmatch(r"(.+)\.a(\d+)\.log", Path(log).name):
        record_to(Path(log).parent.parent, match[1], int(match[2]))


def stop_recording() -> None:
    """Write what is left; from here on nothing is recorded."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def recorder() -> Recorder | None:
    """Return the recorder of this process, where it has one."""
    return _recorder


@contextmanager
def span(name: str, *, lane: str | None = None, is_phase: bool = False, **facts: Fact) -> Iterator[None]:
    """Record the time of a block; it is written when it ends. Spans of one lane (default: of one thread) must nest.

    The beginning of a `phase` is in the file at once; for blocks that come a few times a step.
    """
    active = _recorder
    if active is None:
        yield
        return
    begun = active.begin(name, facts, is_phase, lane)
    try:
        yield
    except BaseException as error:
        if is_phase:
            note_failure(error, name, facts)
        raise
    finally:
        active.end(begun)


phase = partial(span, is_phase=True)


def note_failure(error: BaseException, name: str, facts: Mapping[str, Fact]) -> None:
    """Note on an error that it leaves a phase: the first one counts, and the first step."""
    place, step = failed_in(error), facts.get("step")
    step = int(step) if isinstance(step, int) else None
    if place is None:
        vars(error)[_FAILED_IN] = Place(name, step, time.time())
    elif place.step is None:
        vars(error)[_FAILED_IN] = place._replace(step=step)


def failed_in(error: BaseException) -> Place | None:
    """Return where an error was raised; None where it has left no phase, or this process does not record."""
    place = vars(error).get(_FAILED_IN)
    return place if isinstance(place, Place) else None


def note(name: str, start_ns: int, end_ns: int, lane: str = "", **facts: Fact) -> None:
    """Record a span that has ended, of `time.monotonic_ns()`. Spans of one lane nest or follow each other."""
    if _recorder is not None:
        _recorder.add(["X", lane, name, *_recorder.extent(start_ns, end_ns), facts])


@contextmanager
def course(**facts: Fact) -> Iterator[dict[str, Fact]]:
    """Record the course of a sample. More facts may be added within the block."""
    active = _recorder
    if active is None:
        yield dict(facts)
        return
    parts: list[_Part] = []
    token, start = _parts.set(parts), time.monotonic_ns()
    course_facts = dict(facts)
    try:
        yield course_facts
    except BaseException:
        course_facts.setdefault("status", "aborted")
        raise
    finally:
        _parts.reset(token)
        inner = [(name, *active.extent(begin, end), more) for name, begin, end, more in parts]
        active.add(["S", *active.extent(start, time.monotonic_ns()), course_facts, inner])


def part(name: str, start_ns: int, **facts: Fact) -> None:
    """Note that a part of the present sample's course has ended; without a sample, a span on the lane of rewards."""
    parts = _parts.get()
    if parts is None:
        note(name, start_ns, time.monotonic_ns(), REWARDS, **facts)
    else:
        parts.append((name, start_ns, time.monotonic_ns(), facts))


def count(name: str, **values: float) -> None:
    """Record values of a curve as they are now."""
    if _recorder is not None:
        _recorder.add(["C", name, (time.monotonic_ns() - _recorder.start_ns) // 1000, values])


def main_phases() -> MainPhases:
    """Return the phases of this process's main thread; nothing where it does not record."""
    return MainPhases(None, 0, {}) if _recorder is None else _recorder.main_phases()


def boot_id() -> str:
    """Return the name of this machine's boot: processes that share it share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return socket.gethostname()


def clock() -> tuple[str, int]:
    """Return this machine's boot and its monotonic clock: the answer of a process to `measure_offset`."""
    return boot_id(), time.monotonic_ns()


def measure_offset(ask: Callable[[], tuple[str, int]]) -> tuple[str, int, int]:
    """Measure the clock of another process by round trips; `ask` calls its `clock`.

    Returns:
        Its boot; its clock minus ours, and the most by which that may be wrong, in nanoseconds. Zero, exactly, of a
        process of this machine.
    """
    readings = []
    for _ in range(_ROUND_TRIPS):
        sent = time.monotonic_ns()
        boot, theirs = ask()
        back = time.monotonic_ns()
        if boot == boot_id():
            return boot, 0, 0
        readings.append(((back - sent + 1) // 2, theirs - (sent + back) // 2))
    error, offset = min(readings)
    return boot, offset, error


def _in_fork() -> None:
    global _recorder
    if _recorder is not None:
        _recorder.abandon()
        _recorder = None


os.register_at_fork(after_in_child=_in_fork)
atexit.register(stop_recording)
