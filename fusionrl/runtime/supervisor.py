"""The actors of a run: their names, the waits for their answers, and the death of one that ended.

Ray says that "the actor died unexpectedly", and the actors that needed it say that a connection was closed. A user
wants the name of the dead process and the end of its log (`ActorRegistry.explain`). While the driver waits,
`Supervisor` checks the engines about once a second and looks for a stop request (SIGTERM).
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self, TypeVar

import ray
from ray._private import state as ray_state
from ray.actor import ActorHandle

from fusionrl.base.environment import hide_passwords
from fusionrl.base.memory_groups import MemoryKills
from fusionrl.weights.remote_calls import Reference, gather

logger = logging.getLogger(__name__)

_NUM_LINES = 10
_MAX_TAIL_BYTES = 65536
_LOOK_S = 0.2
_SHORT_OF_MEMORY = "running low on memory"  # as Ray says of an actor that its memory monitor ended


T = TypeVar("T")

FAILURES = (RuntimeError, OSError, ray.exceptions.RayError)
"""Errors that may be the consequence of a process that died."""


def root_cause(error: BaseException) -> BaseException:
    """Return the error that an actor's method raised, without its Ray wrapper."""
    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, BaseException):
        return cause
    return error


class ActorDied(RuntimeError):
    """An actor's process ended while the run needed it; says which one, with the end of its log."""


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

    def begin(self, secrets: Iterable[str | None]) -> None:
        """Count the kernel's kills from now on, and show *** in place of `secrets` in the end of a log."""
        self._memory_kills = MemoryKills()
        self._secrets |= {secret for secret in secrets if secret}

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))  # the watchdog's thread asks, too, while the run adds to it

    def clear(self) -> None:
        self._members.clear()

    def explain(self, error: BaseException, patience_s: float = 1.0) -> ActorDied | None:
        """The death of an actor that is behind `error`; None where all live.

        Ray learns of a death a moment later than the actors that were connected to it: this looks for `patience_s`
        seconds. Of several the first to die is the cause.
        """
        deadline = time.monotonic() + patience_s
        while not (dead := self._dead(error)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if not dead:
            return None
        member, reason = dead[0]
        kills = self._memory_kills.sentence() if self._memory_kills is not None else ""
        parts = [f"{member.name} died: {reason}", kills, self._end_of_log(member.log)]
        return ActorDied(". ".join(filter(None, parts)))

    def _dead(self, error: BaseException) -> list[tuple[Member, str]]:
        """List the dead, each with the reason; the first to die comes first."""
        reported = {cause.actor_id: cause for cause in _chain(error) if isinstance(cause, ray.exceptions.RayActorError)}
        job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
        table = ray_state.actors(job_id=job, actor_state_name="DEAD")
        dead = []
        for member in self:
            if member.id not in table and not isinstance(reported.get(member.id), ray.exceptions.ActorDiedError):
                continue
            facts = table.get(member.id, {})
            reason = _reason(reported.get(member.id), facts.get("Pid"), str(facts.get("DeathCause", "")))
            dead.append((facts.get("EndTime") or float("inf"), member, reason))
        return [(member, reason) for _, member, reason in sorted(dead, key=lambda entry: entry[0])]

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
        return f"Its log is {log}; " + ("the end of it:\n" + "\n".join(lines) if lines else "it is empty")


def _reason(reported: ray.exceptions.RayActorError | None, pid: int | None, cause: str) -> str:
    if reported is not None and reported.actor_init_failed:
        lines = str(reported).strip().splitlines()
        return f"it could not be made ({lines[-1].strip()})"
    process = f"its process {pid}" if pid else "its process"
    if _SHORT_OF_MEMORY in f"{reported} {cause}":
        return f"{process} was ended by Ray, as its node was short of memory"
    return f"{process} ended without an error of its own (killed, out of memory, or crashed)"


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error, what Ray wrapped in it, and what it was raised from."""
    chain = [error]
    for link in chain:  # which grows meanwhile
        causes = (getattr(link, "cause", None), link.__cause__, link.__context__)
        errors = (cause for cause in causes if isinstance(cause, BaseException))
        chain += [error for error in errors if all(error is not known for known in chain)]
    return chain


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
            logger.error("the run ends after this training step: %s", root_cause(error))

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
        return is_time
