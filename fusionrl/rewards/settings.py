"""The flags that rewards need, as typed values: read from a hook's `args` once, at the border."""

from __future__ import annotations

import pickle
from argparse import Namespace
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fusionrl.config.config import HookArgs
from fusionrl.config.hooks import hook_values, register_hooks

_IMMUTABLE = frozenset((str, int, float, bool, bytes, type(None)))


@dataclass(frozen=True)
class Grading:
    """Settings of graders, sent to a reward process with each call.

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

    def with_args(self, args: Namespace | None) -> Grading:
        """Return a copy for one call with `args`, but for values that belong to the rollout's process."""
        if args is None:
            return self
        values = dict(vars(args))
        for name in HookArgs.SHARED:
            values.pop(name, None)
        return replace(self, args=_namespace(values))

    def packed(self) -> PackedGrading:
        """Return the pickles; values of `args` that cannot be pickled are left out."""
        if self.args is None:
            return PackedGrading(pickle.dumps(self), b"")
        values = dict(vars(self.args))
        changing = {name: values.pop(name) for name in [n for n, v in values.items() if type(v) not in _IMMUTABLE]}
        pickled = _pickled(changing)
        if pickled is None:
            pickled = pickle.dumps({name: value for name, value in changing.items() if _pickled(value) is not None})
        return PackedGrading(pickle.dumps(replace(self, args=_namespace(values))), pickled)


class PackedGrading(NamedTuple):
    """Pickles of a `Grading` whose args have immutable values only, and of the other values by name."""

    fixed: bytes
    changing: bytes


class GradingReader:
    """Unpickles gradings: one for each call, as a function may write on its `args`, but immutable values only once."""

    def __init__(self) -> None:
        self._fixed = b""
        self._grading = Grading()  # of `_fixed`

    def read(self, packed: PackedGrading) -> Grading:
        """Return the grading, with an `args` of its own."""
        if packed.fixed != self._fixed:
            grading = pickle.loads(packed.fixed)
            register_hooks(grading.hooks)  # samples may hold objects of classes in their files
            self._fixed, self._grading = packed.fixed, grading
        if self._grading.args is None:
            return self._grading
        return replace(self._grading, args=_namespace(vars(self._grading.args) | pickle.loads(packed.changing)))


def _namespace(values: dict[str, object]) -> Namespace:
    args = Namespace()
    vars(args).update(values)  # for 400 flags, 50 times as fast as keyword arguments
    return args


@dataclass(frozen=True)
class RewardSettings:
    """Everything that scoring a sample depends on, other than the sample.

    grading        what a reward process needs
    is_group_call  --group-rm: one call scores a group
    is_optional    a sample that nothing scores has the reward 0: a teacher teaches it (--use-opd)
    failure_value  the reward of a sample whose function hangs or takes its process down; None: it has none
    args           of the hook that asks, for a user's reward function, and for the reward model's engines
    """

    grading: Grading
    is_group_call: bool
    is_optional: bool
    timeout_s: float
    failure_value: float | None
    num_processes: int | None
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
            args=args,
            in_process=bool(getattr(args, "in_process", False)),
        )


def _pickled(value: object) -> bytes | None:
    """None: it cannot be sent to another process, and stays here."""
    try:
        return pickle.dumps(value)
    except Exception:  # pickling runs code of whatever a hook put there
        return None
