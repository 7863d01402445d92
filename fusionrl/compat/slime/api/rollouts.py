"""Names of `slime.rollout` and `miles.rollout`: about a line of fusionrl each, or calls of a user's function."""

import abc
import asyncio
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from fusionrl.compat.slime.api.misc import load_function
from fusionrl.data.sample import Sample
from fusionrl.rollout import sglang_rollout
from fusionrl.rollout.generate import SampleContext, SamplingParams, apply_sample_hooks
from fusionrl.rollout.generate_state import GenerateState
from fusionrl.rollout.miles_inputs import (
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnInput,
    RolloutFnOutput,
    RolloutFnTrainInput,
)
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


METRICS = """
rollout/dynamic_filter/drop_<reason> | groups | Groups dropped for that reason, as a user's rollout function counts
    them by slime's `MetricGatherer`. | a function of the user that reports it
"""


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


_SHORTEST_OUTPUT, _LONGEST_OUTPUT = 32 << 10, 64 << 10  # tokens of `generate_with_random_osl`
_MOST_TURNS = 16  # where `args` have no generate_max_turns


async def single_turn(input: GenerateFnInput) -> GenerateFnOutput:
    """Generate one answer: the default generate function."""
    return GenerateFnOutput(await sglang_rollout.generate(input.args, input.sample, input.sampling_params))


async def generate_with_random_osl(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate an answer of a random length over 32k tokens, past its end token: for timings."""
    longest = random.randrange(_SHORTEST_OUTPUT, _LONGEST_OUTPUT)
    return await sglang_rollout.generate(
        args, sample, {**sampling_params, "ignore_eos": True, "max_new_tokens": longest}
    )


# ------------------------------------------------------------------------------------------------ tools
class _Tool:
    """A tool with its schema; `execute` runs all tools by name."""

    def __init__(self, schema: dict[str, Any], execute: Callable[[str, dict[str, Any]], Awaitable[str]]) -> None:
        self.schema, self._execute = schema, execute

    async def __call__(self, **arguments: Any) -> str:
        return await self._execute(self.schema["function"]["name"], arguments)


async def multi_turn(input: GenerateFnInput) -> GenerateFnOutput:
    """Let the model call tools (docs/guides/agents.md). These settings of `args` are keys of --custom-config-path:

    generate_tool_specs_path             a list of schemas in the OpenAI format
    generate_execute_tool_function_path  `async execute(name, arguments) -> str`
    generate_max_turns                   overrides --max-turns; 16 by default
    generate_tool_call_parser            overrides --tool-call-parser

    Raises:
        ValueError: one of the two is not given, or cannot be loaded.
    """
    from fusionrl.rollout.agent import run_agent

    schemas = load_function(_setting(input.args, "generate_tool_specs_path"))
    execute = load_function(_setting(input.args, "generate_execute_tool_function_path"))
    args = Namespace(**vars(input.args))
    args.max_turns = getattr(args, "generate_max_turns", _MOST_TURNS)
    args.tool_call_parser = getattr(args, "generate_tool_call_parser", args.tool_call_parser)
    tools = [_Tool(schema, execute) for schema in schemas]
    return GenerateFnOutput(await run_agent(args, input.sample, input.sampling_params, tools))


# ------------------------------------------------------------------------------------------------ agents
def build_chat_request_kwargs(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a chat request that the session proxy reads, by OpenAI's names."""
    names = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "stop": "stop"}
    return {new: sampling_params[old] for old, new in names.items() if sampling_params.get(old) is not None}


async def agentic_tool_call(input: GenerateFnInput) -> GenerateFnOutput:
    """Run the agent `f(base_url, prompt, request_kwargs, metadata)` of custom_agent_function_path in a session.

    It sends requests of OpenAI's protocol to `base_url`/v1, without a key: the address has the key in it. The dict that
    it returns is added to the sample's metadata. The run's reward function scores the sample.

    Raises:
        ValueError: no agent is named, or it cannot be loaded.
        HookError: the agent raised.
    """
    from fusionrl.rollout.sessions import Agent, generate_by

    setting = "custom_agent_function_path"
    path = _setting(input.args, setting)
    function = load_function(path)

    async def agent(args: Namespace, sample: Sample, base_url: str, api_key: str) -> None:
        agent_metadata = await function(
            base_url=base_url.removesuffix("/v1").rpartition("/")[0] + f"/{api_key}",
            prompt=sample.prompt if sample.messages is None else sample.messages,
            request_kwargs=build_chat_request_kwargs(input.sampling_params),
            metadata=dict(sample.metadata),
        )
        sample.metadata.update(agent_metadata or {})

    arguments = (input.args, input.sample, input.sampling_params, input.evaluation)
    return GenerateFnOutput(await generate_by(Agent(setting, path, agent), *arguments))


def _setting(args: Namespace, name: str) -> str:
    path = getattr(args, name, None)
    if path is None:
        raise ValueError(f"{name} is not given: write it into the file of --custom-config-path")
    return str(path)


def check_no_aborted(args: Namespace, samples: list[Sample], **kwargs: object) -> DynamicFilterOutput:
    """Drop a group with an aborted sample, or one whose agent sent no request (FAILED)."""
    unanswered = (Sample.Status.ABORTED, Sample.Status.FAILED)
    has_all = not any(sample.status in unanswered for sample in samples)
    return DynamicFilterOutput(has_all, None if has_all else "group_has_aborted")


# ------------------------------------------------------------------------------------------------ rollouts
class InferenceRolloutFn:
    """The default rollout as a class; a subclass may override `_call_train` and `_call_eval`."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.args, self.data_source = input.args, input.data_source

    @property
    def state(self) -> GenerateState:
        """State of the current rollout."""
        return GenerateState(self.args)

    async def __call__(self, input: RolloutFnInput) -> RolloutFnOutput:
        """Generate a rollout, or evaluate."""
        if isinstance(input, RolloutFnEvalInput):
            return await self._call_eval(input)
        return await self._call_train(input)

    async def _call_train(self, input: RolloutFnTrainInput) -> RolloutFnTrainOutput:
        self.args.rollout_id = input.rollout_id
        return await sglang_rollout.generate_groups(self.args, self.data_source)

    async def _call_eval(self, input: RolloutFnEvalInput) -> RolloutFnEvalOutput:
        return (await eval_rollout(self.args, input.rollout_id))[0]
