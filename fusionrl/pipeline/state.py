"""What the controller knows: the events of a pipeline, the actions it decides on, and the state that they change.

A started action is applied like an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Admitted:
    """The engines start a group's samples."""

    ordinal: int
    num_samples: int
    oldest: int | None = None  # version of its oldest token, if it has tokens already
    is_spare: bool = False  # admitted beyond the bound


@dataclass(frozen=True)
class SampleDone:
    """One sample of a group has ended, successfully or not."""

    ordinal: int


@dataclass(frozen=True)
class GroupReady:
    """A group has its rewards. `oldest`: version of its oldest token that is trained on."""

    ordinal: int
    oldest: int | None = None


@dataclass(frozen=True)
class GroupFailed:
    """A group cannot be trained; it is retried (up to `Knobs.max_group_tries`) or dropped. Its samples have ended: no
    event of this try follows.
    """

    ordinal: int
    reason: str


@dataclass(frozen=True)
class Parked:
    """A group was handed back unfinished, with its tokens so far; it continues when it is admitted again."""

    ordinal: int
    oldest: int | None = None  # version of its oldest token; None: it has no tokens


@dataclass(frozen=True)
class TrainDone:
    """The trainers have trained the leased groups."""


@dataclass(frozen=True)
class Pushed:
    """The engines have the trainers' weights."""


@dataclass(frozen=True)
class StreamEnd:
    """The data stream has no further group."""


@dataclass(frozen=True)
class Admit:
    """Admit these pending groups, and `num_new` from the data stream. `Admitted` events say which they were."""

    pending: tuple[int, ...] = ()
    num_new: int = 0


@dataclass(frozen=True)
class Fetch:
    """Train these groups, in this order, as fetch number `fetch`, by weights of `version`."""

    fetch: int
    ordinals: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class Drop:
    """Give up a group: end its samples, count it by `reason`. Another group may take its place."""

    ordinal: int
    reason: Literal["filtered", "failed", "deadline", "surplus"]


@dataclass(frozen=True)
class Push:
    """Give the engines the trainers' weights, as `version`."""

    version: int


@dataclass(frozen=True)
class Stop:
    """The run has ended; `reason` is "" if it has done all of its work."""

    reason: str = ""


@dataclass(frozen=True)
class Wait:
    """`who` has nothing to do now. The watchdog shows why.

    reason  why trainers get no batch: too few groups are ready, or a group that is due is not; timed separately
    """

    who: Literal["engines", "trainers"]
    why: str
    on: tuple[int, ...] = ()  # groups
    reason: Literal["", "batch", "deadline"] = ""


Event = Admitted | SampleDone | GroupReady | GroupFailed | Parked | TrainDone | Pushed | StreamEnd
Started = Fetch | Drop | Push  # actions that are applied when they start
Action = Started | Admit | Stop | Wait


Phase = Literal["pending", "running", "scoring", "ready", "leased"]


@dataclass(frozen=True)
class Group:
    """One prompt and its samples.

    ordinal      place in the data stream, from 0
    phase        pending: to be admitted (again); running: samples in flight; scoring: rewards; ready: may be trained;
                 leased: is being trained
    born         version of the weights when it was admitted, or of its oldest token, whichever is older
    num_running  samples in flight
    num_tries    how often it has been admitted
    has_tokens   pending, with saved tokens: it continues from them, and is as old as they are
    is_spare     admitted beyond the bound, because a user's function was stuck without it: dropped if it is too late
    """

    ordinal: int
    phase: Phase
    born: int
    num_running: int = 0
    num_tries: int = 1
    has_tokens: bool = False
    is_spare: bool = False

    @property
    def order(self) -> tuple[bool, int, int]:
        """Order of dispatch and of training; groups beyond the bound come last."""
        return self.is_spare, self.born, self.ordinal


@dataclass
class EndedGroups:
    """Groups that are trained or dropped: all below `frontier`, and those in `beyond`, which are at or above it."""

    frontier: int = 0
    beyond: set[int] = field(default_factory=set)

    def add(self, ordinal: int) -> None:
        """Note that a group has ended."""
        assert ordinal not in self, ordinal
        self.beyond.add(ordinal)
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def __contains__(self, ordinal: int) -> bool:
        return ordinal < self.frontier or ordinal in self.beyond

    def __len__(self) -> int:
        return self.frontier + len(self.beyond)


@dataclass
class State:
    """The whole state. It has one owner, which changes it only through `apply`."""

    groups: dict[int, Group] = field(default_factory=dict)  # ordinal → group, of those that have not ended
    ended: EndedGroups = field(default_factory=EndedGroups)  # trained and dropped groups
    num_dropped: int = 0  # of `ended`, the dropped ones
    num_spare: int = 0  # groups that were admitted beyond the bound and not dropped
    next_ordinal: int = 0  # of the next group from the data stream
    version: int = 0  # of the engines' weights: pushes so far
    num_fetched: int = 0  # fetches that the trainers have started
    num_trained: int = 0  # fetches that are trained
    lease: tuple[int, ...] = ()  # ordinals of the fetch that is being trained, () between fetches
    pushing: bool = False  # a push is in progress
    stream_ended: bool = False  # the data stream has no further group
    failures: int = 0  # groups dropped as failed since one became ready
    failure: str = ""  # why the run must end, "" while it continues

    def of(self, *phases: Phase) -> list[Group]:
        """Return the groups of these phases, in no order."""
        return [group for group in self.groups.values() if group.phase in phases]

    def unready(self) -> list[Group]:
        """Return the groups that have an age and are not ready: running, scoring, and pending ones with tokens."""
        return [g for g in self.groups.values() if g.phase in ("running", "scoring") or g.has_tokens]

    @property
    def samples_in_flight(self) -> int:
        return sum(group.num_running for group in self.groups.values())

    @property
    def committed(self) -> int:
        """Return how many groups were admitted and not dropped: they are or will be trained."""
        return len(self.groups) + len(self.ended) - self.num_dropped

    def to_dict(self, num_trained: int | None = None) -> dict[str, Any]:
        """Return the state for a checkpoint after `num_trained` fetches (None: those that are trained).

        The fetch that is being trained counts as trained if `num_trained` includes it; else its groups come again.
        """
        is_trained = num_trained is not None and num_trained == self.num_trained + 1
        assert num_trained in (None, self.num_trained) or (is_trained and self.lease), (num_trained, self.num_trained)
        ended = EndedGroups(self.ended.frontier, set(self.ended.beyond))
        for ordinal in self.lease if is_trained else ():
            ended.add(ordinal)
        live = [group for group in self.groups.values() if group.ordinal not in ended]
        return {
            "frontier": ended.frontier,
            "beyond": sorted(ended.beyond),
            "num_dropped": self.num_dropped,
            "num_spare": self.num_spare,
            "next_ordinal": self.next_ordinal,
            "num_trained": self.num_trained + is_trained,
            "stream_ended": self.stream_ended,
            "groups": [[g.ordinal, g.phase, g.born, g.num_tries, g.is_spare] for g in live],
        }

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], update_weights_interval: int, saved_ages: Mapping[int, int] | None = None
    ) -> State:
        """Return the state of a checkpoint, after the engines have its weights.

        saved_ages  ordinal → version of the oldest token, of the groups whose finished or partial samples were saved.
                    The others are admitted again from their prompts, under their ordinals.
        """
        saved_ages = saved_ages or {}
        trained = data["num_trained"]
        state = cls(
            ended=EndedGroups(data["frontier"], set(data["beyond"])),
            num_dropped=data["num_dropped"],
            num_spare=data["num_spare"],
            next_ordinal=data["next_ordinal"],
            version=trained // update_weights_interval,
            num_fetched=trained,
            num_trained=trained,
            stream_ended=data["stream_ended"],
        )
        for ordinal, phase, born, num_tries, is_spare in data["groups"]:
            is_kept = ordinal in saved_ages
            now: Phase = "ready" if phase in ("ready", "leased") and is_kept else "pending"
            born = min(born, saved_ages[ordinal]) if is_kept else state.version
            has_tokens = is_kept and now == "pending"
            state.groups[ordinal] = Group(ordinal, now, born, 0, num_tries, has_tokens=has_tokens, is_spare=is_spare)
        return state


def update_group(state: State, ordinal: int, **changes: Any) -> None:
    state.groups[ordinal] = replace(state.groups[ordinal], **changes)
