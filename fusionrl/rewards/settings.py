"""The flags that rewards need, as typed values: read from a hook's `args` once, at the border."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import is_

from fusionrl.config.config import HookArgs
from fusionrl.config.hooks import hook_values


@dataclass(frozen=True)
class Grading:
    """Settings of graders: sent to a reward process once for all samples of the same flags.

    hooks  field → functions of that flag: samples may hold objects of classes in their files
    args   as a user's reward function gets them; None where a built-in reward scores
    """

    rm_type: str = ""
    custom_rm_path: str | None = None
    rm_url: str | None = None
    format_regex: str | None = None
    allow_weak_sandbox: bool = False
    hooks: dict[str, object] = field(default_factory=dict)
    args: Namespace | None = None

    def packed(self, args: Namespace | None) -> bytes:
        """Return the pickle, with `args` for a user's function; of these, values that cannot be pickled stay here."""
        if args is None:
            return pickle.dumps(self)
        values = {name: value for name, value in vars(args).items() if name not in HookArgs.SHARED}
        pickled = _pickled(replace(self, args=Namespace(**values)))
        if pickled is not None:
            return pickled
        picklable = {name: item for name, item in values.items() if _pickled(item) is not None}
        return pickle.dumps(replace(self, args=Namespace(**picklable)))


class GradingCopies:
    """A pickled `Grading` for each call anew, as a function may write on its `args`; values that it cannot change
    within are shared."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._first: Grading = pickle.loads(pickled)
        args = self._first.args
        values = {} if args is None else vars(args)
        changing = [name for name, value in values.items() if type(value) not in UNCHANGING]
        self._values = dict(values)
        self._changing = _pickled({name: values[name] for name in changing})

    def grading(self) -> Grading:
        """One for one call."""
        if self._first.args is None:
            return self._first
        if self._changing is None:
            again: Grading = pickle.loads(self._pickled)
            return again
        args = Namespace()
        vars(args).update(self._values)
        vars(args).update(pickle.loads(self._changing))
        return replace(self._first, args=args)


class GradingPickler:
    """`Grading.packed`, once for as long as nothing changes.

    Every sample is scored with all flags; to pickle those takes longer than all else that is done to ask for a reward.
    """

    def __init__(self) -> None:
        self._last: _Packed | None = None

    def packed(self, grading: Grading, args: Namespace | None) -> bytes:
        """`grading.packed(args)`; the same object again where neither has changed since."""
        last = self._last
        if args is None:
            return grading.packed(None)
        if last is None or not last.holds(grading, vars(args)):
            last = self._last = _Packed.of(grading, vars(args))
        return last.pickled


# Types of immutable values: comparing or sharing them takes no pickle.
UNCHANGING = frozenset((str, int, float, bool, bytes, type(None)))


@dataclass(frozen=True)
class _Packed:
    """A pickle of a grading with the values of an `args`, and what tells whether it still holds.

    values    by name: the same objects mean the same flags, but for those that may change within
    changing  names of these
    state     pickle of what these were; None where one of them cannot be pickled
    """

    grading: Grading
    values: dict[str, object]
    changing: tuple[str, ...]
    state: bytes | None
    pickled: bytes

    @classmethod
    def of(cls, grading: Grading, values: Mapping[str, object]) -> _Packed:
        named = {name: type(value) for name, value in values.items() if name not in HookArgs.SHARED}
        changing = tuple(name for name, kind in named.items() if kind not in UNCHANGING)
        return cls(grading, dict(values), changing, _state(values, changing), grading.packed(Namespace(**values)))

    def holds(self, grading: Grading, values: Mapping[str, object]) -> bool:
        """Return whether this pickle also holds for `grading` with `values`."""
        return (
            self.state is not None
            and len(values) == len(self.values)
            and all(map(is_, values, self.values))
            and all(map(is_, values.values(), self.values.values()))
            and grading == self.grading
            and _state(values, self.changing) == self.state
        )


def _state(values: Mapping[str, object], names: tuple[str, ...]) -> bytes | None:
    return _pickled([values[name] for name in names])


@dataclass(frozen=True)
class ScorerAddress:
    """The reward model's engines, and how they read a sample; no urls: the run has no reward model."""

    urls: tuple[str, ...]
    api_key: str | None
    model: str | None
    reads: str  # --rm-input
    policy: str  # --hf-checkpoint
    timeout_s: float


@dataclass(frozen=True)
class RewardSettings:
    """Everything that scoring a sample depends on, other than the sample.

    grading        what a reward process needs
    is_group_call  --group-rm: one call scores a group
    is_optional    a sample that nothing scores has the reward 0: a teacher teaches it (--use-opd)
    failure_value  the reward of a sample whose function hangs or takes its process down; None: it has none
    args           of the hook that asks, handed on to a user's reward function
    """

    grading: Grading
    is_group_call: bool
    is_optional: bool
    timeout_s: float
    failure_value: float | None
    num_processes: int | None
    scorer: ScorerAddress
    args: Namespace
    in_process: bool = False  # no other process scores (--in-process)

    @classmethod
    def of_args(cls, args: Namespace) -> RewardSettings:
        """Read them from a hook's `args`, which a user may have made: only what every call needs must be there."""
        return cls(
            grading=Grading(
                rm_type=args.rm_type or "",
                custom_rm_path=args.custom_rm_path,
                rm_url=getattr(args, "rm_url", None),
                format_regex=getattr(args, "rm_format_regex", None),
                allow_weak_sandbox=bool(getattr(args, "allow_weak_sandbox", False)),
                hooks=hook_values(vars(args)),
            ),
            is_group_call=bool(getattr(args, "group_rm", False)),
            is_optional=bool(getattr(args, "use_opd", False)),
            timeout_s=args.reward_timeout_s,
            failure_value=getattr(args, "reward_failure_value", None),
            num_processes=getattr(args, "reward_num_processes", None),
            scorer=ScorerAddress(
                urls=tuple(getattr(args, "rm_urls", None) or ()),
                api_key=getattr(args, "api_key", None),
                model=getattr(args, "rm_model", None),
                reads=getattr(args, "rm_input", "auto"),
                policy=getattr(args, "hf_checkpoint", ""),
                timeout_s=args.reward_timeout_s,
            ),
            args=args,
            in_process=bool(getattr(args, "in_process", False)),
        )


def _pickled(value: object) -> bytes | None:
    """None: it cannot be sent to another process, and stays here."""
    try:
        return pickle.dumps(value)
    except Exception:  # pickling runs code of whatever a hook put there
        return None
