"""Return types of rollout functions and filters (slime's names)."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypedDict

from fusionrl.config.hooks import HookError, flag_of
from fusionrl.data.columns import AdapterColumn, check_adapter
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import adopt_images, restore_images
from fusionrl.data.sample_json import check_values
from fusionrl.data.train_batch import join_attempt

# In a sample's metadata: after how many turns of the model a limit of length left no room for a further one.
NO_ROOM_AFTER = "no_room_after_turns"
# In a sample's metadata, of an agent behind the session proxy: {"segment", "num_segments", "num_turns"}, and "error"
# where there was one. Segments beyond the first are histories that the agent rewrote.
SESSION = "session"
_keeps_draws: ContextVar[bool] = ContextVar("keeps_draws", default=False)


@contextmanager
def keeping_draws() -> Iterator[None]:
    """In this block, groups of a data source are drawn to be kept between the calls of the rollout function."""
    token = _keeps_draws.set(True)
    try:
        yield
    finally:
        _keeps_draws.reset(token)


def keeps_draws() -> bool:
    """Return whether the code that runs is in a block of `keeping_draws`."""
    return _keeps_draws.get()


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples to train on, and metrics of the rollout function's own.

    refused  finished groups that are not trained on; --rollout-all-samples-process-path sees them, too
    """

    samples: list[list[Sample]]
    metrics: dict[str, Any] = field(default_factory=dict)
    refused: list[list[Sample]] = field(default_factory=list)


class EvalResult(TypedDict):
    """One evaluation set's answers, in the order of its samples; hooks may leave out what is not required."""

    rewards: Sequence[float]
    truncated: NotRequired[Sequence[bool]]
    samples: NotRequired[list[Sample]]


class DataSource(Protocol):
    """The part of a data source that a rollout function uses: it takes groups of samples and hands some back."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Take the next groups."""
        ...

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Hand groups back; they come first in the next rollout."""
        ...


@dataclass
class RolloutFnEvalOutput:
    """Per evaluation set: `{"rewards": […], "truncated": […], "samples": […]}`."""

    data: dict[str, EvalResult]
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class DynamicFilterOutput:
    """The decision to keep a group; the reason against it is counted in the metrics.

    With `keep_when_insufficient` a group is kept all the same where, without it, more prompts would have to be sampled.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


_GENERATING = frozenset({"custom_generate_function_path", "rollout_function_path"})


class RolloutAborted(RuntimeError):
    """The rollout was stopped before it had enough groups."""


@dataclass(frozen=True)
class Limits:
    """Limits of numbers in samples. None: not known, and not checked."""

    vocab_size: int | None = None  # ids of tokens are below it
    num_experts: int | None = None  # of a layer; numbers of experts are below it
    adapters: tuple[str, ...] = ()  # of a run with several, of which each sample names one

    @classmethod
    def of_args(cls, args: Namespace) -> Limits:
        """Read them from a hook's `args`, which a user may have made."""
        column = AdapterColumn.of(args)
        names = () if column is None else column.names
        return cls(getattr(args, "vocab_size", None), getattr(args, "num_experts", None), names)


def check_samples(field: str, path: str, samples: Sequence[object], limits: Limits, *, are_new: bool = True) -> None:
    """Check what a user's function returned: samples whose fields fit together, with numbers within the limits.

    Their images are taken in; not `are_new`: those were before, and stay what they were.

    Raises HookError, which names the flag of `field`, the function, and what is wrong.
    """
    where = f"{flag_of(field)} {path}"
    for sample in samples:
        if not isinstance(sample, Sample):
            raise HookError(f"{where}: it returned a {type(sample).__name__} where a Sample is wanted")
        if sample.status == Sample.Status.PENDING and not sample.response_length and field in _GENERATING:
            problem = "came back as it went in: its status is pending, and it has no response; generate one, or set its"
            raise HookError(f"{where}: sample {sample.index} {problem} status to FAILED", [sample])
        try:
            if (processor := IMAGES.processor) is not None:
                is_known = not are_new or (sample.image_spans and field not in _GENERATING)
                restore_images(sample) if is_known else adopt_images(sample, processor)
            check_values(sample, limits.vocab_size, limits.num_experts)
            check_adapter(sample, limits.adapters)
        except (TypeError, ValueError) as error:
            raise HookError(f"{where}: {error}", [sample]) from error
        sample.pack()


def take_images(where: str, samples: Sequence[Sample]) -> None:
    """Take in the images of samples that a user's rollout function returned; HookError: they do not fit."""
    if (processor := IMAGES.processor) is None:
        return
    for sample in samples:
        try:
            adopt_images(sample, processor)
        except ValueError as error:
            raise HookError(f"{where}: {error}", [sample]) from error


def as_train_output(output: object) -> RolloutFnTrainOutput:
    """Return the output of a rollout function; bare lists are accepted.

    Raises ValueError for what is neither a RolloutFnTrainOutput nor a list of groups or samples.
    """
    if hasattr(output, "samples") and hasattr(output, "metrics"):
        refused = list(getattr(output, "refused", []))
        return RolloutFnTrainOutput(_as_groups(output.samples), dict(output.metrics or {}), refused)
    return RolloutFnTrainOutput(_as_groups(output))


def _as_groups(groups: object) -> list[list[Sample]]:
    if not isinstance(groups, list):
        raise ValueError(f"--rollout-function-path: it returned {type(groups).__name__}; a list of groups is wanted")
    for item in _leaves(groups):
        if not isinstance(item, Sample):
            raise ValueError(f"--rollout-function-path: it returned a {type(item).__name__} where a Sample is wanted")
    if groups and not any(isinstance(group, list) for group in groups):
        # A flat list: the siblings of a group stand side by side.
        positions = range(len(groups))
        keys = [-1 - i if groups[i].group_index is None else groups[i].group_index for i in positions]
        return [[groups[i] for i in run] for _, run in itertools.groupby(positions, key=keys.__getitem__)]
    for group in groups:
        for position, attempt in enumerate(group if isinstance(group, list) else ()):
            if isinstance(attempt, list):  # copies of one prompt may all have its index
                join_attempt(list(_leaves(attempt)), -1 - position)
    return [list(_leaves(group)) for group in groups]


def _leaves(group: object) -> Iterator[Any]:
    """The samples of a group; a generate function that returns several leaves a list within it."""
    for item in group if isinstance(group, list) else [group]:
        if isinstance(item, list):
            yield from _leaves(item)
        else:
            yield item


def as_eval_output(output: object) -> RolloutFnEvalOutput:
    """As `as_train_output`, for an evaluation."""
    if hasattr(output, "data"):
        return RolloutFnEvalOutput(output.data, dict(getattr(output, "metrics", None) or {}))
    if isinstance(output, dict):
        return RolloutFnEvalOutput(output)
    raise ValueError(f"--eval-function-path: it returned {type(output).__name__}; a dict of sets is wanted")


def flatten(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]
