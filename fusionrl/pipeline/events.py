"""What happens to a pipeline, and what the controller wants done. An action that is begun is applied like an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Admitted:
    """A group's samples are on their way.

    oldest    version of its oldest token, where it has tokens already
    is_spare  beyond what may be admitted
    """

    ordinal: int
    num_samples: int
    oldest: int | None = None
    is_spare: bool = False


@dataclass(frozen=True)
class SampleDone:
    """One sample of a group has ended, well or not."""

    ordinal: int


@dataclass(frozen=True)
class GroupReady:
    """A group has its rewards. `oldest`: version of its oldest token that is trained on."""

    ordinal: int
    oldest: int | None = None


@dataclass(frozen=True)
class GroupFailed:
    """A group cannot be trained; it is tried again (`Knobs.max_tries`), or dropped. Its samples have been ended before:
    nothing of this try is told any more.
    """

    ordinal: int
    reason: str


@dataclass(frozen=True)
class Parked:
    """A group was handed back before it was ready, with the tokens that it has; it goes on when it is admitted again.

    oldest  version of its oldest token, None where it has none
    """

    ordinal: int
    oldest: int | None = None


@dataclass(frozen=True)
class TrainDone:
    """The trainers have trained the leased groups."""


@dataclass(frozen=True)
class Pushed:
    """The engines have the trainers' weights."""


@dataclass(frozen=True)
class EvalDone:
    """The evaluation has ended."""


@dataclass(frozen=True)
class Saved:
    """The checkpoint may be relied on, or is written from a copy."""


@dataclass(frozen=True)
class EnginesAre:
    """So many engines live now."""

    count: int


@dataclass(frozen=True)
class StreamEnd:
    """The data stream has no further group."""


@dataclass(frozen=True)
class Failed:
    """The run cannot go on."""

    reason: str


@dataclass(frozen=True)
class Admit:
    """Admit these pending groups, and `num_new` from the data stream. Their `Admitted` events tell which they were."""

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
    """Give a group up: end its samples, count it by `reason`. Its place is free for another."""

    ordinal: int
    reason: Literal["filtered", "failed", "deadline", "surplus"]


@dataclass(frozen=True)
class Push:
    """Give the engines the trainers' weights, as `version`."""

    version: int


@dataclass(frozen=True)
class Eval:
    """Evaluate by the engines' weights."""

    version: int


@dataclass(frozen=True)
class Save:
    """Save after `num_trained` fetches."""

    num_trained: int


@dataclass(frozen=True)
class Stop:
    """The run has ended; `reason` is "" where it has done all of its work."""

    reason: str = ""


@dataclass(frozen=True)
class Wait:
    """Nothing to do for `who` now: for a person who asks, and for the watchdog.

    reason  of trainers that want a batch: too few groups are ready, or one that is due is not; whose time is told apart
    """

    who: Literal["engines", "trainers"]
    why: str
    on: tuple[int, ...] = ()  # groups
    reason: Literal["", "batch", "deadline"] = ""


Happened = Admitted | SampleDone | GroupReady | GroupFailed | Parked | TrainDone | Pushed | EvalDone | Saved
Event = Happened | EnginesAre | StreamEnd | Failed
Begun = Fetch | Drop | Push | Eval | Save  # actions that are applied when they begin
Action = Begun | Admit | Stop | Wait
