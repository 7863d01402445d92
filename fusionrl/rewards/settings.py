"""The flags that rewards need, as typed values: read from a hook's `args` once, at the border."""

from __future__ import annotations

import pickle
from argparse import Namespace
from dataclasses import dataclass, field, replace

from fusionrl.config.config import HookArgs
from fusionrl.config.hooks import hook_values


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
        values = {name: value for name, value in vars(args).items() if name not in HookArgs.SHARED}
        return replace(self, args=Namespace(**values))

    def packed(self) -> bytes:
        """Return the pickle; values of `args` that cannot be pickled are left out."""
        pickled = _pickled(self)
        if pickled is None and self.args is not None:
            picklable = {name: value for name, value in vars(self.args).items() if _pickled(value) is not None}
            return pickle.dumps(replace(self, args=Namespace(**picklable)))
        return pickled or pickle.dumps(self)


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
