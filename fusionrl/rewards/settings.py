"""The flags that rewards need, as typed values: read from a hook's `args` once, at the border."""

from __future__ import annotations

import pickle
from argparse import Namespace
from dataclasses import dataclass, field, replace

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
        whole = _pickled(replace(self, args=Namespace(**values)))
        if whole is not None:
            return whole
        kept = {name: one for name, one in values.items() if _pickled(one) is not None}
        return pickle.dumps(replace(self, args=Namespace(**kept)))


@dataclass(frozen=True)
class ScorerAddress:
    """The reward model's engines, and how a sample is put to them; no urls: there is no reward model."""

    urls: tuple[str, ...]
    api_key: str | None
    model: str | None
    reads: str  # --rm-input
    policy: str  # --hf-checkpoint
    timeout_s: float


@dataclass(frozen=True)
class RewardSettings:
    """Everything that scoring a sample depends on besides the sample.

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
