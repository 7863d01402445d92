"""Events of a pipeline, and the actions that the controller decides on. A started action is applied like an event."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Admitted:
    """The engines start a group's samples.

    oldest    version of its oldest token, if it has tokens already
    is_spare  admitted beyond the bound
    """

    ordinal: int
    num_samples: int
    oldest: int | None = None
    is_spare: bool = False


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
    """A group cannot be trained; it is retried (up to `Knobs.max_tries`) or dropped. Its samples have ended: no event
    of this try follows.
    """

    ordinal: int
    reason: str


@dataclass(frozen=True)
class Parked:
    """A group was handed back unfinished, with its tokens so far; it continues when it is admitted again.

    oldest  version of its oldest token; None: it has no tokens
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
