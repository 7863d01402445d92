"""The reward function of a sample, its call, and the reasons for a missing reward."""

from __future__ import annotations

import asyncio
import functools
import inspect
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fusionrl import sandbox
from fusionrl.config.hooks import load_function, register_hooks
from fusionrl.config.user_code import blamed_samples, user_frames
from fusionrl.data.sample import Sample
from fusionrl.rewards.registry import REMOTE, grade
from fusionrl.rewards.remote import PATH
from fusionrl.rewards.settings import Grading


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


def reward_path(grading: Grading, sample: Sample) -> str | None:
    """The function that scores the sample, a user's or the one that asks a server; None: a built-in reward does."""
    path = sample.custom_rm_path or grading.custom_rm_path
    return PATH if path is None and rm_type_of(grading, sample) == REMOTE else path


def reward_name(grading: Grading, sample: Sample) -> str:
    """Return the name of the reward that scores the sample, for messages.

    In this order: the sample's own function, --custom-rm-path, `rm_type` of the sample's metadata, --rm-type.
    """
    path = reward_path(grading, sample)
    if path == PATH:
        return f"--rm-type {REMOTE} of --rm-url {grading.rm_url}"
    if path is not None:
        return f"--custom-rm-path {path}"
    rm_type = _metadata(sample).get("rm_type")
    return f"--rm-type {rm_type} of the sample's metadata" if rm_type else f"--rm-type {grading.rm_type or None}"


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


def call_reward(grading: Grading, target: Sample | list[Sample], **kwargs: object) -> object:
    """Call the reward function for a sample, or for a group with --group-rm; returns a reward, or an awaitable.

    `model_score` is among the keywords where a reward model has scored the sample. The parts of a weighted sum are kept
    in `sample.metadata["rewards"]`, the tests that a program failed, by reason, in `sample.metadata["code_failures"]`.
    """
    path = grading.custom_rm_path if isinstance(target, list) else reward_path(grading, target)
    if path is not None:
        return load_function(path)(grading.args, target, **kwargs)
    assert isinstance(target, Sample)
    metadata = _metadata(target)
    settings_and_metadata = {"format_regex": grading.format_regex} | metadata
    sandbox.allow_weak(grading.allow_weak_sandbox)
    score = kwargs.get("model_score")
    model_score = score if isinstance(score, float | int) else None
    graded = grade(rm_type_of(grading, target), target.response, target.label, settings_and_metadata, model_score)
    entries = {"rewards": graded.parts, "code_failures": graded.failures}
    if any(entries.values()):  # a new dict: the samples of a group may share theirs
        target.metadata = metadata | {name: value for name, value in entries.items() if value}
    return graded.reward


def rm_type_of(grading: Grading, sample: Sample) -> str:
    """The built-in reward of the sample where no function scores it; empty if there is none."""
    return str(_metadata(sample).get("rm_type") or grading.rm_type)


def _metadata(sample: Sample) -> dict[str, object]:
    return sample.metadata if isinstance(sample.metadata, dict) else {}


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """Return the one thread of all plain functions: one debugger's prompt at a time. The event loop runs meanwhile."""
    return ThreadPoolExecutor(1, thread_name_prefix="reward")


async def score_here(
    grading: Grading, samples: Sequence[Sample], *, call: str, kwargs: Mapping[str, object], is_async: bool
) -> object:
    """Call a reward function in this process (--in-process): a breakpoint in it stops in the terminal.

    Nothing guards against a function that hangs or ends its process, and no time limit applies. Raises RewardRaised,
    whose cause is what the function raised.
    """
    register_hooks(grading.hooks)
    target = list(samples) if call == "group" else samples[0]
    try:
        if is_async:
            reward = call_reward(grading, target, **kwargs)
        else:
            calling = functools.partial(call_reward, grading, target, **kwargs)
            reward = await asyncio.wrap_future(_thread().submit(calling))
        return await reward if inspect.isawaitable(reward) else reward
    except Exception as error:  # a user's function may raise anything
        raise RewardRaised.of(error, reward_path(grading, samples[0]), samples) from error
