"""When the watchdog speaks, and its line: who waits for whom, for how long, and how far the others are. Pure.

A phase is late after max(floor, 5 x its median), and then again after pauses that double: after 60 s, 120 s, 240 s, …
One that has never ended has no median; it is given 5 x the floor. The caller passes the time.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fusionrl.observe.rollouts import as_ranges
from fusionrl.observe.stalls.processes import ProcessState

FLOOR_S = 60.0
FACTOR = 5.0


@dataclass(frozen=True)
class Phase:
    """A phase of the driver that has not ended. `since` comes from the same clock as `now`."""

    name: str
    since: float


@dataclass(frozen=True)
class LatePhase:
    """A phase of which to speak.

    seconds  since it began
    usual_s  its median so far; None: no phase of this name has ended yet
    number   of the report about this phase, from 1
    is_last  it has reached --stall-timeout-s: the run ends
    """

    phase: str
    seconds: float
    usual_s: float | None
    number: int
    is_last: bool = False


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
    """Two looks at an engine, a second apart.

    fault  it does not answer: the reason; "" where it does
    """

    name: str
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    fault: str = ""

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
    progress    how far others are, each in words
    sizes       of the groups in `waited_for`: "trainer rank" → 8
    file        the file with the stacks
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
        collective = thread.collective if thread is not None else None
        if thread is not None and collective:
            waiting[f"{collective} of {thread.place}"].append(rank)
        elif process.trouble:
            away[process.trouble].append(rank)
        else:
            away[f"in {thread.place}" if thread is not None and thread.place else "silent"].append(rank)
    if not waiting:
        return ""
    here = "; ".join(
        f"{_ranks(numbers)} wait{'s' * (len(numbers) == 1)} in {place}" for place, numbers in waiting.items()
    )
    if away:
        places = [f"{_ranks(numbers)} ({place})" for place, numbers in list(away.items())[:_MOST_PLACES]]
        more = ", …" * (len(away) > _MOST_PLACES)
        return f"{here}, where {', '.join(places)}{more} did not arrive"
    return here if len(waiting) == 1 else f"the ranks wait in different collectives: {here}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {as_ranges(numbers)}"
