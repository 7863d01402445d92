"""Names of `miles.rollout`: its generate functions, its default rollout as a class, and a filter."""

import random
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from fusionrl.compat.slime.api.misc import load_function
from fusionrl.compat.slime.api.rollouts import eval_rollout
from fusionrl.data.sample import Sample
from fusionrl.rollout import sglang_rollout
from fusionrl.rollout.agent import run_agent
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
from fusionrl.rollout.sessions import Agent, generate_by
from fusionrl.rollout.types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput

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
