"""Names of `slime.rollout` that take about one line of fusionrl, and those that call a user's function."""

import abc
import asyncio
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from fusionrl.data.sample import Sample
from fusionrl.rollout import sglang_rollout
from fusionrl.rollout.generate import SampleContext, SamplingParams, apply_sample_hooks
from fusionrl.rollout.types import (
    DynamicFilterOutput,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    as_eval_output,
    as_train_output,
)

GetSamples = Callable[[int], list[list[Sample]]]


class DataSource(abc.ABC):
    """The methods that a data source has; a class of a user's own may derive from it (--data-source-path)."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Take the next groups."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Write the state of a checkpoint."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Read the state of a checkpoint."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of prompts."""


def pop_first(
    args: Namespace, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Take the oldest groups out of the buffer: the default of --buffer-filter-path."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Return the address of an endpoint of a model; there is one router, so any name gives the policy's."""
    host, port = (getattr(args, "sglang_model_routers", None) or {}).get(
        model_name, (args.sglang_router_ip, args.sglang_router_port)
    )
    return f"http://{host}:{port}{endpoint}"


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: GetSamples
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Run the default rollout on this event loop; returns its output and the groups that go back to the data source."""
    args.rollout_id = rollout_id
    returned: list[list[Sample]] = []
    source: Any = SimpleNamespace(get_samples=data_source, add_samples=returned.extend)
    return await sglang_rollout.generate_groups(args, source), returned


async def eval_rollout(args: Namespace, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[list[Sample]]]:
    """Evaluate every set of the flags on this event loop."""
    args.rollout_id = rollout_id
    return await sglang_rollout.evaluate_sets(args), []


async def generate_streaming(args: Namespace, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Generate the response of one sample, piece by piece, so that an abort leaves it with what has come."""
    async with aclosing(sglang_rollout.stream_generate(args, sample, sampling_params)) as pieces:
        async for _ in pieces:
            await asyncio.sleep(0)
    return sample


async def apply_rollout_sample_hooks(args: Namespace, value: Any, **kwargs: object) -> Any:
    """Call the functions of --rollout-sample-hook-path on a sample, or on each of a nested list of them.

    For copies of the rollout loop in slime: `generate_and_rm` calls them itself.

    Raises:
        HookError: a function raised, or returned something other than a sample.
    """
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    context = SampleContext.of_args(args)
    return await apply_sample_hooks(context, value, evaluation=bool(kwargs.get("evaluation", False)))


def sleep(args: Namespace, rollout_id: int, data_source: object, evaluation: bool = False) -> None:
    """Never return: the engines stay up for a person to look at, until the run is stopped."""
    while not args.abort_event.wait(1.0):
        time.sleep(0)
    raise sglang_rollout.RolloutAborted("the sleeping rollout was told to stop")


# ------------------------------------------------------------------------------------------------ base_types
def call_dynamic_filter(fn: Callable[..., Any] | None, *args: object, **kwargs: object) -> DynamicFilterOutput:
    """Ask a filter about a group; a bare bool is accepted, and without a filter every group is kept."""
    verdict = DynamicFilterOutput(keep=True) if fn is None else fn(*args, **kwargs)
    return verdict if hasattr(verdict, "keep") else DynamicFilterOutput(keep=bool(verdict))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Return whether a group is dropped; one that is kept when there are too few stays where no spare group is left."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts the groups that a filter dropped, by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a dropped group; one without a reason is not counted."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return the counts as metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}


def call_rollout_fn(
    fn: Callable[..., Any], *args: object, evaluation: bool, **kwargs: object
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function; wrap bare lists and dicts in the output class."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    return as_eval_output(output) if evaluation else as_train_output(output)
