"""The actors of a run: their names, the waits for their answers, and the death of one that ended.

Ray says that "the actor died unexpectedly", and the actors that needed it say that a connection was closed. A user
wants the name of the dead process and the end of its log (`ActorRegistry.explain`). While the driver waits,
`Supervisor` checks the engines about once a second and looks for a stop request (SIGTERM).
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import ray
from ray._private import state as ray_state
from ray.actor import ActorHandle

from fusionrl.base.environment import hide_passwords
from fusionrl.base.memory_groups import MemoryKills, shared_memory_sentence
from fusionrl.base.sockets import LOOPBACK
from fusionrl.base.wording import LOG_END, headline
from fusionrl.engines.process import ChildExited
from fusionrl.weights.remote_calls import Reference, gather

logger = logging.getLogger(__name__)

_NUM_LINES = 10
_MAX_TAIL_BYTES = 65536
_LOOK_S = 0.2
_SHORT_OF_MEMORY = "running low on memory"  # as Ray says of an actor that its memory monitor ended
# What Ray writes about the actor that raised an error, and our servers about their end.
_CALL = re.compile(r"\(pid=(\d+), ip=([^,)\s]+)(?:, actor_id=([0-9a-f]+))?")
_SERVER = re.compile(r" of (the router|[a-z-]+ \d+) at http")
_ORIGIN = "fusionrl_origin"  # attribute of an error


T = TypeVar("T")

FAILURES = (RuntimeError, OSError, ray.exceptions.RayError)
"""Errors that may be the consequence of a process that died."""


def root_cause(error: BaseException) -> BaseException:
    """Return the error that an actor's method raised, without its Ray wrapper."""
    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, BaseException):
        return cause
    return error


@dataclass(frozen=True)
class Origin:
    """The process that failed first."""

    process: str  # as messages name it
    pid: int | None  # None: of a server, whose number the driver does not know
    node: str  # its address


class ActorDied(RuntimeError):
    """An actor's process ended while the run needed it; says which one, with the end of its log."""

    member: Member
    """The first that died."""


@dataclass(frozen=True)
class Member:
    """One actor."""

    name: str  # as messages use it: "trainer rank 3", "the Buffer", "engine 1"
    handle: ActorHandle
    log: Path

    @property
    def id(self) -> str:
        return str(self.handle._actor_id.hex())


class ActorRegistry:
    """Every actor of the run. An actor that takes another's place takes its name."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._secrets: set[str] = set()
        self._memory_kills: MemoryKills | None = None  # of the driver's machine

    def add(self, name: str, handle: ActorHandle, log: Path) -> None:
        self._members[name] = Member(name, handle, log)

    def forget(self, handles: Iterable[ActorHandle]) -> None:
        """Leave actors out that the run has ended itself."""
        gone = list(handles)
        self._members = {name: member for name, member in self._members.items() if member.handle not in gone}

    def begin(self, secrets: Iterable[str | None]) -> None:
        """Count the kernel's kills from now on, and show *** in place of `secrets` in the end of a log."""
        self._memory_kills = MemoryKills()
        self._secrets |= {secret for secret in secrets if secret}

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))  # the watchdog's thread asks, too, while the run adds to it

    def clear(self) -> None:
        self._members.clear()

    def processes(self, handles: Iterable[ActorHandle]) -> dict[str, list[int]]:
        """Return the processes of actors that are not known to be dead: node → process ids."""
        table, found = self._table(), defaultdict[str, list[int]](list)
        for handle in handles:
            facts = table.get(handle._actor_id.hex(), {})
            if facts.get("Pid") and facts["State"] != "DEAD":
                found[facts["Address"]["NodeID"]].append(facts["Pid"])
        return found

    @staticmethod
    def _table(state: str | None = None) -> dict[str, dict[str, Any]]:
        job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
        table: dict[str, dict[str, Any]] = ray_state.actors(job_id=job, actor_state_name=state)
        return table

    def explain(
        self, error: BaseException, patience_s: float = 1.0, among: Sequence[ActorHandle] | None = None
    ) -> ActorDied | None:
        """The death of an actor (`among` these) that is behind `error`; None where all live.

        Ray learns of a death a moment later than the actors that were connected to it: this looks for `patience_s`
        seconds. Of several the first to die is the cause.
        """
        deadline = time.monotonic() + patience_s
        while not (dead := self._dead(error, among)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if not dead:
            return None
        member, reason, origin = dead[0]
        kills = self._memory_kills.sentence() if self._memory_kills is not None else ""
        parts = [f"{member.name} died: {reason}", kills, shared_memory_sentence(), self._end_of_log(member.log)]
        death = ActorDied(". ".join(filter(None, parts)))
        death.member = member
        vars(death)[_ORIGIN] = origin
        return death

    def note_origin(self, error: BaseException) -> None:
        """Note on an error the process that raised it, unless this one did; see `origin_of`."""
        links = chain(error)[::-1]  # the innermost one first
        calls = [call for link in links if isinstance(link, ray.exceptions.RayTaskError) for call in _calls(link)]
        servers = (_SERVER.search(str(link)) for link in links if isinstance(link, ChildExited))
        server = next((match[1] for match in servers if match), None)
        pid, node, actor = calls[0] if calls else ("", LOOPBACK, "")
        if server is not None:  # the call was that of the actor that watches it
            vars(error)[_ORIGIN] = Origin(server, None, node)
        elif calls:
            name = next((member.name for member in self if member.id == actor), "an actor")
            vars(error)[_ORIGIN] = Origin(name, int(pid), node)

    def _dead(
        self, error: BaseException, among: Sequence[ActorHandle] | None = None
    ) -> list[tuple[Member, str, Origin]]:
        """List the dead, each with the reason; the first to die comes first."""
        reported = {cause.actor_id: cause for cause in chain(error) if isinstance(cause, ray.exceptions.RayActorError)}
        table, dead = self._table("DEAD"), []
        for member in self:
            if among is not None and member.handle not in among:
                continue
            if member.id not in table and not isinstance(reported.get(member.id), ray.exceptions.ActorDiedError):
                continue
            facts = table.get(member.id, {})
            reason = _reason(reported.get(member.id), facts.get("Pid"), str(facts.get("DeathCause", "")))
            node = facts.get("Address", {}).get("IPAddress") or LOOPBACK
            origin = Origin(member.name, facts.get("Pid"), node)
            dead.append((facts.get("EndTime") or float("inf"), member, reason, origin))
        return [entry[1:] for entry in sorted(dead, key=lambda entry: entry[0])]

    def _end_of_log(self, log: Path) -> str:
        try:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _MAX_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return f"Its log, on its own node, is {log}"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        lines = hide_passwords(text).splitlines()[-_NUM_LINES:]
        return f"Its log is {log}; " + (LOG_END + "\n".join(lines) if lines else "it is empty")


def origin_of(error: BaseException) -> Origin | None:
    """Return the process that `explain` or `note_origin` has noted on an error."""
    origin = vars(error).get(_ORIGIN)
    return origin if isinstance(origin, Origin) else None


def _calls(error: BaseException) -> list[tuple[str, str, str]]:
    """Return (pid, address, actor) of the calls in the text of an error of Ray, the innermost first."""
    return _CALL.findall(str(error))[::-1]


def actor_of(error: BaseException) -> str:
    """Return the id of the actor that raised an error, "" where it does not say."""
    calls = _calls(error)
    return calls[0][2] if calls else ""


def _reason(reported: ray.exceptions.RayActorError | None, pid: int | None, cause: str) -> str:
    if reported is not None and reported.actor_init_failed:
        lines = str(reported).strip().splitlines()
        return f"it could not be made ({lines[-1].strip()})"
    process = f"its process {pid}" if pid else "its process"
    if _SHORT_OF_MEMORY in f"{reported} {cause}":
        return f"{process} was ended by Ray, as its node was short of memory"
    return f"{process} ended without an error of its own (killed, out of memory, or crashed)"


def chain(error: BaseException) -> list[BaseException]:
    """Return the error, what Ray wrapped in it, and what it was raised from."""
    links = [error]
    for link in links:  # which grows meanwhile
        causes = (getattr(link, "cause", None), link.__cause__, link.__context__)
        errors = (cause for cause in causes if isinstance(cause, BaseException))
        links += [error for error in errors if all(error is not known for known in links)]
    return links


class Terminated(Exception):
    """SIGTERM arrived: the trained steps are saved, then the run ends."""


class StopSignal:
    """Turns the first SIGTERM into a request that the loop finds; a second one acts as Ctrl-C."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._is_announced = False

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGTERM)
        self.install()
        return self

    def install(self) -> None:
        """Take SIGTERM; again after Ray has started, which takes it for itself."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested.is_set():
            raise KeyboardInterrupt
        self._requested.set()

    def check(self) -> None:
        """Raise Terminated once SIGTERM has arrived."""
        if self._requested.is_set():
            raise Terminated("SIGTERM")

    def is_requested(self) -> bool:
        """Return whether SIGTERM has arrived. The first time, log what happens next."""
        if self._requested.is_set() and not self._is_announced:
            self._is_announced = True
            logger.warning("SIGTERM: this rollout is trained to its end, then the run stops; a second one ends it now")
        return self._requested.is_set()


class Supervisor:
    """Waits for calls of actors. About once a second it checks the engines, which may raise, and looks for a stop."""

    def __init__(self, check_engines: Callable[[bool], object], stop: StopSignal, interval_s: float = 1.0) -> None:
        """`check_engines` gets whether the engines generate: only then can they be asked for a token."""
        self._check_engines, self._stop, self._interval_s = check_engines, stop, interval_s
        self._next_look = 0.0
        self._has_dead = False  # an engine, or the router, died while trainers worked
        self._has_warned_of_shm = False  # and not had room since

    def wait(self, ref: Reference[T]) -> T:
        """Wait for the Buffer's answer while the engines generate. A stop request ends the wait."""

        def look() -> None:
            self._stop.check()
            self._check_engines(True)

        return self._gather([ref], look, is_generating=True)[0]

    def finish(self, refs: Sequence[Reference[T]]) -> list[T]:
        """Wait for trainers. Raises at the first failure, as the other ranks may be waiting for that one.

        A stop request or a dead engine is logged and does not end the wait: a checkpoint holds whole rollouts. After a
        stop request engines may die, as no push comes.
        """
        return self._gather(refs, self._look, is_generating=False)

    def _look(self) -> None:
        """Log a stop request, or a dead engine. After a stop request the engines may have received the signal too."""
        if self._stop.is_requested() or self._has_dead:
            return
        try:
            self._check_engines(False)
        except FAILURES as error:
            self._has_dead = True
            logger.error("the run ends after this training step: %s", headline(str(root_cause(error))))

    def _gather(self, refs: Sequence[Reference[T]], look: Callable[[], None], *, is_generating: bool) -> list[T]:
        try:
            answers = gather(refs, lambda: look() if self._is_time() else None, self._interval_s)
        except ray.exceptions.RayTaskError:
            # Raises, with the engine's log, if a dead engine is the cause; a stop request does not hide it.
            self._check_engines(is_generating)
            raise
        if self._is_time():  # all waits may be shorter than the interval; a stop request must not discard the answers
            self._look()
        return answers

    def _is_time(self) -> bool:
        is_time = time.monotonic() >= self._next_look
        if is_time:
            self._next_look = time.monotonic() + self._interval_s
            self._warn_of_shm()
        return is_time

    def _warn_of_shm(self) -> None:
        """Warn while there is a driver to do so: a full /dev/shm may end it without a message."""
        sentence = shared_memory_sentence()
        if sentence and not self._has_warned_of_shm:
            logger.warning("%s", sentence)
        self._has_warned_of_shm = bool(sentence)
