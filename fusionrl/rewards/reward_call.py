"""One call of a reward: its settings, the function that scores a sample, the call itself, and reasons of its failure.

The process that asks (`dispatch`) and the reward processes (`worker`) share this module.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import traceback
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fusionrl.config.config import HookArgs
from fusionrl.config.hooks import hook_values, load_function, register_hooks
from fusionrl.config.user_code import blamed_samples, user_frames
from fusionrl.data.sample import Sample
from fusionrl.rewards.registry import REMOTE, REMOTE_PATH, grade, runs_programs

_IMMUTABLE = frozenset((str, int, float, bool, bytes, type(None)))


@dataclass(frozen=True)
class RewardSettings:
    """Everything that scoring a sample depends on, other than the sample; read from a hook's `args` once.

    args           of the hook that asks; a user's function gets them, and none of the others
    hooks          field → functions of that flag: samples may hold objects of classes in their files
    is_group_call  --group-rm: one call scores a group
    is_optional    a sample that nothing scores has the reward 0: a teacher teaches it (--use-opd)
    failure_value  the reward of a sample whose function hangs or takes its process down; None: it has none
    in_process     no other process scores (--in-process)
    """

    args: Namespace | None
    rm_type: str = ""
    custom_rm_path: str | None = None
    rm_url: str | None = None
    format_regex: str | None = None
    allow_weak_sandbox: bool = False
    hooks: dict[str, object] = field(default_factory=dict)
    is_group_call: bool = False
    is_optional: bool = False
    timeout_s: float = 60.0
    failure_value: float | None = None
    num_processes: int | None = None
    in_process: bool = False

    @classmethod
    def of_args(cls, args: Namespace) -> RewardSettings:
        """Read them from a hook's `args`, which a user may have made: only what every call needs must be there."""
        return cls(
            args=args,
            rm_type=args.rm_type or "",
            custom_rm_path=args.custom_rm_path,
            rm_url=getattr(args, "rm_url", None),
            format_regex=getattr(args, "rm_format_regex", None),
            allow_weak_sandbox=bool(getattr(args, "allow_weak_sandbox", False)),
            hooks=hook_values(vars(args)),
            is_group_call=bool(getattr(args, "group_rm", False)),
            is_optional=bool(getattr(args, "use_opd", False)),
            timeout_s=args.reward_timeout_s,
            failure_value=getattr(args, "reward_failure_value", None),
            num_processes=getattr(args, "reward_num_processes", None),
            in_process=bool(getattr(args, "in_process", False)),
        )

    def for_call(self, path: str | None) -> RewardSettings:
        """Return a copy with what the function of `path` gets as its `args`: all flags go to a user's alone.

        Values that belong to the rollout's process stay there. A built-in reward (None) gets no `args`.
        """
        if path is None or self.args is None:
            return replace(self, args=None)
        if path == REMOTE_PATH:
            return replace(self, args=Namespace(rm_url=self.rm_url))
        values = {name: value for name, value in vars(self.args).items() if name not in HookArgs.SHARED}
        return replace(self, args=_namespace(values))

    def packed(self) -> PackedSettings:
        """Return the pickles; values of `args` that cannot be pickled are left out."""
        if self.args is None:
            return PackedSettings(pickle.dumps(self), b"")
        values = dict(vars(self.args))
        changing = {name: values.pop(name) for name in [n for n, v in values.items() if type(v) not in _IMMUTABLE]}
        pickled = _pickled(changing)
        if pickled is None:
            pickled = pickle.dumps({name: value for name, value in changing.items() if _pickled(value) is not None})
        return PackedSettings(pickle.dumps(replace(self, args=_namespace(values))), pickled)


class PackedSettings(NamedTuple):
    """Pickles of settings whose args have immutable values only, and of the other values by name."""

    fixed: bytes
    changing: bytes

    def read(self) -> RewardSettings:
        """Return the settings, with an `args` of its own, as a function may write on it; see `_read_fixed`."""
        settings = _read_fixed(self.fixed)
        if settings.args is None:
            return settings
        return replace(settings, args=_namespace(vars(settings.args) | pickle.loads(self.changing)))


@functools.lru_cache(maxsize=1)
def _read_fixed(pickled: bytes) -> RewardSettings:
    """Unpickle the immutable part, which is the same for most calls, and register the hooks of the samples' classes."""
    settings: RewardSettings = pickle.loads(pickled)
    register_hooks(settings.hooks)
    return settings


def _namespace(values: dict[str, object]) -> Namespace:
    args = Namespace()
    vars(args).update(values)  # for 400 flags, 50 times as fast as keyword arguments
    return args


def _pickled(value: object) -> bytes | None:
    """None: it cannot be sent to another process, and stays here."""
    try:
        return pickle.dumps(value)
    except Exception:  # pickling runs code of whatever a hook put there
        return None


@dataclass
class LostReward:
    """The reason why a sample has no reward: "timeout", "crash" or "error", and what the function said."""

    reason: str
    detail: str = ""


class RewardRaised(Exception):
    """The reward function raised; the text is what it said.

    frames     the user's own lines of its traceback, as `user_frames` gives them
    trace      all of the traceback
    positions  which of the call's samples it was at; empty where that is not known
    """

    def __init__(self, text: str, frames: str = "", trace: str = "", positions: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.frames, self.trace, self.positions = frames, trace, tuple(positions)

    @classmethod
    def of(cls, error: BaseException, path: str | None, samples: Sequence[Sample]) -> RewardRaised:
        """Describe what the function `path` raised at `samples`."""
        blamed = set(map(id, blamed_samples(error, path)))
        positions = [position for position, sample in enumerate(samples) if id(sample) in blamed]
        trace = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__}: {error}", user_frames(error, path), trace, positions)


class Scorer(NamedTuple):
    """What scores a sample: the function of `path`, a user's or the one that asks a server; None: `rm_type` does."""

    path: str | None
    rm_type: str  # "": none
    name: str  # for messages


def scorer_of(settings: RewardSettings, sample: Sample) -> Scorer:
    """Return what scores the sample.

    In this order: the sample's own function, --custom-rm-path, `rm_type` of the sample's metadata, --rm-type.
    """
    path, own_type = sample.custom_rm_path or settings.custom_rm_path, _metadata(sample).get("rm_type")
    rm_type = str(own_type or settings.rm_type)
    if path is not None:
        return Scorer(path, rm_type, f"--custom-rm-path {path}")
    if rm_type == REMOTE:
        return Scorer(REMOTE_PATH, rm_type, f"--rm-type {REMOTE} of --rm-url {settings.rm_url}")
    origin = " of the sample's metadata" if own_type else ""
    return Scorer(None, rm_type, f"--rm-type {rm_type or None}{origin}")


def is_async(path: str | None) -> bool:
    """Return whether the function of `path` is to run on an event loop."""
    return path is not None and inspect.iscoroutinefunction(load_function(path))


def takes_a_list(path: str | None) -> bool:
    """Return whether a function scores several samples in a call: its second parameter is `samples`, as in slime."""
    if path is None:
        return False
    try:
        names = list(inspect.signature(load_function(path)).parameters)
    except ValueError:  # a builtin without a signature
        return False
    return names[1:2] == ["samples"]


def call_reward(settings: RewardSettings, target: Sample | list[Sample], **kwargs: object) -> object:
    """Call the reward function for a sample, or for a group with --group-rm; returns a reward, or an awaitable.

    `model_score` is among the keywords where a reward model has scored the sample. The parts of a weighted sum are kept
    in `sample.metadata["rewards"]`, the tests that a program failed, by reason, in `sample.metadata["code_failures"]`.
    """
    if isinstance(target, list):
        assert settings.custom_rm_path is not None
        return load_function(settings.custom_rm_path)(settings.args, target, **kwargs)
    path, rm_type, _ = scorer_of(settings, target)
    if path is not None:
        return load_function(path)(settings.args, target, **kwargs)
    if runs_programs(rm_type):
        from fusionrl import sandbox

        sandbox.allow_weak(settings.allow_weak_sandbox)
    metadata = _metadata(target)
    score = kwargs.get("model_score")
    model_score = score if isinstance(score, float | int) else None
    with_regex = {"format_regex": settings.format_regex} | metadata
    graded = grade(rm_type, target.response, target.label, with_regex, model_score)
    entries = {"rewards": graded.parts, "code_failures": graded.failures}
    if any(entries.values()):  # a new dict: the samples of a group may share theirs
        target.metadata = metadata | {name: value for name, value in entries.items() if value}
    return graded.reward


def _metadata(sample: Sample) -> dict[str, object]:
    return sample.metadata if isinstance(sample.metadata, dict) else {}
