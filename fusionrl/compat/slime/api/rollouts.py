"""Names of `slime.rollout` that take about one line of fusionrl."""

from __future__ import annotations

import abc
import asyncio
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from fusionrl.data.sample import Sample
from fusionrl.rollout import sglang_rollout
from fusionrl.rollout.generate import SampleContext, apply_sample_hooks
from fusionrl.rollout.model_turn import SamplingParams
from fusionrl.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

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


class _Source:
    """A data source of one function; what is handed back is kept."""

    def __init__(self, take: GetSamples) -> None:
        self.get_samples = take
        self.returned: list[list[Sample]] = []

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.returned += samples


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: GetSamples
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Run the default rollout on this event loop; returns its output and the groups that go back to the data source."""
    args.rollout_id = rollout_id
    source = _Source(data_source)
    output = await sglang_rollout.generate_groups(args, source)
    return output, source.returned


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
