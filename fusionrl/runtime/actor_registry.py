"""The actors of a run by name, and the error of one that died.

Ray says that "the actor died unexpectedly", and the actors that needed it say that a connection was closed. A user
wants the name of the dead process and the end of its log.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private import state as ray_state
from ray.actor import ActorHandle

from fusionrl.base.environment import hide_passwords
from fusionrl.base.memory_groups import MemoryKills

_NUM_LINES = 10
_MAX_TAIL_BYTES = 65536
_LOOK_S = 0.2
_SHORT_OF_MEMORY = "running low on memory"  # as Ray says of an actor that its memory monitor ended


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
        self._memory_kills = MemoryKills()  # of the driver's machine

    def add(self, name: str, handle: ActorHandle, log: Path) -> None:
        self._members[name] = Member(name, handle, log)

    def hide(self, secrets: Iterable[str | None]) -> None:
        """Show *** in place of these when the end of a log is shown."""
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
        kills = self._memory_kills.sentence()
        if kills:
            reason += f". {kills}"
        return ActorDied(f"{member.name} died: {reason}. {self._end_of_log(member.log)}")

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


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what Ray wrapped in it, and what it was raised from."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        causes = (getattr(current, "cause", None), current.__cause__, current.__context__)
        pending += [cause for cause in causes if isinstance(cause, BaseException)]
