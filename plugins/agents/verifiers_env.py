"""Environments of the package `verifiers` (Prime Intellect): their turns by our engines, their rubric as reward.

    python tools/make_verifiers_data.py --env verifiers.ReasoningGymEnv --env-args '{"gym": "chain_sum"}' --out DIR
    fusionrl train … --prompt-data DIR/train.jsonl --input-key prompt --apply-chat-template
        --custom-generate-function-path plugins.agents.verifiers_env.generate
        --custom-rm-path plugins.rewards.rubric.reward

The environment asks its client for messages; ours answers with what the engines sample, tokens in, tokens out: what
was sampled is kept as it was, what the environment said after it is rendered by the chat template with mask 0. A
request that does not continue the conversation (an environment that rewrites its history, several agents in one) begins
a new sample; all samples of one rollout share its reward. A row's metadata names its environment, so that a mixture may
have several.
"""

import copy
import functools
import importlib
import json
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fusionrl.config.hooks import load_function
from fusionrl.data.columns import PromptColumns
from fusionrl.data.prompts import render_prompt
from fusionrl.data.render import tokens_after_assistant
from fusionrl.data.sample import Sample
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.client import Generation
from fusionrl.rollout.agent import append_tokens, begin, end_of_turn, parse_tool_calls, plain_text
from fusionrl.rollout.sglang_rollout import generate_turn

try:
    import verifiers as vf
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall, Usage
except ImportError as error:
    raise ValueError(
        f"plugins.agents.verifiers_env needs the package verifiers; scripts/setup-env.sh examples installs it ({error})"
    ) from error

FOLLOWS = ("user", "tool", "system")  # who may speak after the model and leave the conversation the same


# ------------------------------------------------------------------------------------------------ a rollout
async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """One rollout of the environment that `sample.metadata["verifiers"]` names: {"env", "env_args", "input"}.

    The rubric's score goes to `sample.metadata["rubric"]` ("reward" and each function's value), for
    plugins/rewards/rubric.py. COMPLETED and TRUNCATED are the environment's; FAILED where it met an error of its own
    (`vf.Error`, a sandbox that is gone), told in `sample.metadata["verifiers_error"]` and not trained on. Other
    exceptions end the rollout.

    Raises:
        ValueError: the row was not written by tools/make_verifiers_data.py, its environment cannot be loaded or scores
            groups, or there is no chat template.
    """
    row = sample.metadata.get("verifiers")
    if not isinstance(row, dict) or not {"env", "input"} <= set(row):
        raise ValueError(
            "the sample's metadata has no verifiers.env and verifiers.input: write --prompt-data with"
            " tools/make_verifiers_data.py, and let --metadata-key name its column metadata"
        )
    if sample.messages is None:
        raise ValueError("environments of verifiers speak in messages: add --apply-chat-template")
    env = load_env(row["env"], json.dumps(row.get("env_args") or {}, sort_keys=True))
    client = EngineClient(args, sample, sampling_params)
    state = await env.rollout({**row["input"], "prompt": sample.messages}, client, args.hf_checkpoint)
    samples = [conversation.sample for conversation in client.conversations] or [sample]
    if any(part.status == Sample.Status.ABORTED for part in samples):
        status = Sample.Status.ABORTED
    elif state.get("error") is not None or not client.conversations:
        status = Sample.Status.FAILED
    else:
        cut = state.get("is_truncated") or state.get("timed_out")
        status = Sample.Status.TRUNCATED if cut else Sample.Status.COMPLETED
        await env.rubric.score_rollout(state)
    await env.rubric.cleanup(state)
    for part in samples:
        part.status = status
        part.metadata["num_turns"] = len(state["trajectory"])
        part.metadata["stop_condition"] = state.get("stop_condition")
        if status == Sample.Status.FAILED:
            part.metadata["verifiers_error"] = repr(state.get("error") or "the environment took no turn of the model")
        elif status != Sample.Status.ABORTED:
            part.metadata["rubric"] = {**(state["metrics"] or {}), "reward": float(state["reward"])}
    return samples[0] if len(samples) == 1 else samples


@functools.cache
def load_env(name: str, env_args: str) -> Any:
    """The `vf.Environment` of a name, once a process; `env_args` is JSON.

    name  an installed environment's ("reverse-text", by its `load_environment`), or what makes one:
          "package.module.function" (or class), "path/to/file.py:function"

    Raises:
        ValueError: it cannot be made, or its rubric compares the samples of a group.
    """
    # An environment takes SIGINT and SIGTERM for itself: only a main thread may, and Ray's workers have their own.
    module = importlib.import_module("verifiers.envs.environment")
    module.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    is_path = ":" in name or ("." in name and "/" not in name)
    make = load_function(name) if is_path else functools.partial(vf.load_environment, name)
    try:
        env = make(**json.loads(env_args))
    except Exception as error:  # an environment's own code may raise anything; all of it is said the same way
        raise ValueError(f"the environment {name!r} with {env_args} cannot be made: {error!r}") from error
    if not isinstance(env, vf.Environment):
        raise ValueError(f"{name!r} made {type(env).__name__}, which is not a verifiers.Environment")
    if env.requires_group_rollouts:
        raise ValueError(f"the rubric of {name!r} has functions of a whole group; only those of one rollout are run")
    return env


# ------------------------------------------------------------------------------------------------ the client
@dataclass
class Conversation:
    """A sample, and the messages of its tokens; the last is the model's."""

    sample: Sample
    messages: list[dict[str, Any]]
    schemas: list[dict[str, Any]]
    end_token: int | None = None


class EngineClient(Client):
    """The model of an environment: a client of one rollout, over the engines of `args.generate_client`."""

    def __init__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
        super().__init__(args.generate_client)
        self.args, self.sampling_params = args, sampling_params
        self.sample, self.blank = sample, copy.deepcopy(sample)
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.conversations: list[Conversation] = []

    async def get_response(
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: Any = None, **kwargs: Any
    ) -> Response:
        """Let the model answer; `vf.OverlongPromptError` where no room is left, `vf.ModelError` after an abort.

        Raises:
            ValueError: a message that is not text, or sampling arguments that the run's flags decide.
        """
        params, longest = self._sampling_params(sampling_args)
        messages = [as_chat(message) for message in prompt]
        schemas = [as_schema(tool) for tool in tools or []]
        conversation = self._go_on(messages, schemas, params) or self._start(messages, schemas)
        num_prompt = len(conversation.sample.tokens)
        answer = await generate_turn(self.args, conversation.sample, params, longest=longest)
        if conversation.sample.status == Sample.Status.ABORTED:
            raise vf.ModelError("the rollout was aborted")
        if answer is None:
            raise vf.OverlongPromptError(f"{num_prompt} tokens leave no room for a turn")
        conversation.end_token = end_of_turn(answer)
        message = await self._message(conversation, answer)
        conversation.messages = [*messages, as_chat(message)]
        num_new = len(answer.tokens)
        usage = Usage(
            prompt_tokens=num_prompt, reasoning_tokens=0, completion_tokens=num_new, total_tokens=num_prompt + num_new
        )
        number = str(answer.meta_info.get("id", ""))
        return Response(id=number, created=int(time.time()), model=model, usage=usage, message=message)

    def _go_on(
        self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]], params: dict[str, Any]
    ) -> Conversation | None:
        """The conversation that `messages` continue, word for word, with what is new in them appended."""
        for conversation in reversed(self.conversations):
            done = len(conversation.messages)
            new = messages[done:]
            known = messages[:done] == conversation.messages and schemas == conversation.schemas
            if known and new and all(message["role"] in FOLLOWS for message in new):
                break
        else:
            return None
        limit = self.args.max_tool_response_len
        new = [message | {"content": plain_text(self.tokenizer, message["content"], limit)} for message in new]
        names = {call["id"]: call["function"]["name"] for call in conversation.messages[-1].get("tool_calls", [])}
        for message in new:
            if message["role"] == "tool":
                message["name"] = names.get(message["tool_call_id"], "tool")
        kwargs = self.args.apply_chat_template_kwargs
        tokens = tokens_after_assistant(
            new, self.tokenizer, end_token=conversation.end_token, template_kwargs=kwargs, tools=schemas or None
        )
        if not append_tokens(self.args, conversation.sample, params, tokens, self.tokenizer.decode(tokens)):
            raise vf.OverlongPromptError(f"{len(tokens)} tokens more leave no room for a turn")
        return conversation

    def _start(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> Conversation:
        """A sample of a prompt of its own; the first is the row's sample itself."""
        sample = copy.deepcopy(self.blank) if self.conversations else self.sample
        columns = PromptColumns("", apply_chat_template=True, chat_template_kwargs=self.args.apply_chat_template_kwargs)
        sample.prompt = render_prompt(messages, self.tokenizer, columns, schemas or None).text
        sample.prompt_tokens = None
        if schemas:
            sample.metadata["tools"] = schemas
        begin(self.args, sample)
        self.conversations.append(Conversation(sample, messages, schemas))
        return self.conversations[-1]

    async def _message(self, conversation: Conversation, answer: Generation) -> ResponseMessage:
        """A turn as the environment reads it: a call that cannot be read is text, as with an OpenAI-style server."""
        tokens = answer.tokens if conversation.end_token is None else answer.tokens[:-1]
        cut = answer.finish_reason == "length"
        content = self.tokenizer.decode(tokens, skip_special_tokens=True)
        calls: list[ToolCall] = []
        if conversation.schemas and not cut:
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            reply, tool_calls = await parse_tool_calls(self.args, self.tokenizer, conversation.schemas, text)
            if tool_calls and not any(call.error for call in tool_calls):
                content = reply
                first = sum(len(message.get("tool_calls", [])) for message in conversation.messages)
                calls = [
                    ToolCall(id=f"call{first + i:05d}", name=call.name, arguments=call.arguments)
                    for i, call in enumerate(tool_calls)
                ]
        reason = "length" if cut else "tool_calls" if calls else "stop"
        return ResponseMessage(content=content, tool_calls=calls or None, finish_reason=reason, is_truncated=cut)

    def _sampling_params(self, sampling: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The run's, with an environment's own stop strings; and its limit of tokens of this turn."""
        sampling = {name: value for name, value in sampling.items() if value is not None and value not in ({}, [])}
        limits = [sampling.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in sampling]
        stop = sampling.pop("stop", [])
        if sampling.pop("n", 1) != 1 or sampling:
            raise ValueError(
                f"the environment asks for sampling arguments of its own ({sampling}); samples that are trained on have"
                " those of the run's flags, --rollout-temperature and its like"
            )
        params = dict(self.sampling_params)
        if stop:
            params["stop"] = [*params.get("stop", []), *([stop] if isinstance(stop, str) else stop)]
        return params, min(limits, default=None)

    # The parts of a client over a network, of which `get_response` needs none.
    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        raise NotImplementedError

    async def to_native_prompt(self, messages: Any) -> Any:
        raise NotImplementedError

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        raise NotImplementedError

    async def from_native_response(self, response: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        """The connections are the rollout's, and stay."""


# ------------------------------------------------------------------------------------------------ messages
def as_chat(message: Any) -> dict[str, Any]:
    """A message of verifiers, or a dict, as chat templates read it.

    Raises:
        ValueError: it holds content other than text.
    """
    get = message.get
    content = get("content")
    if isinstance(content, list):
        kinds = {part.get("type") for part in content}
        if kinds - {"text"}:
            raise ValueError(f"a message of the environment holds {sorted(kinds)}; only text can be rendered")
        content = "".join(part.get("text") for part in content)
    role = "user" if get("role") == "text" else get("role")
    fields: dict[str, Any] = {"role": role, "content": content or ""}
    if get("tool_call_id") is not None:
        fields["tool_call_id"] = get("tool_call_id")
    if get("reasoning_content") is not None:
        fields["reasoning_content"] = get("reasoning_content")
    if calls := get("tool_calls"):
        fields["tool_calls"] = [_as_call(call) for call in calls]
    return fields


def _as_call(call: Any) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    try:  # templates write arguments as JSON themselves
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        pass
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def as_schema(tool: Any) -> dict[str, Any]:
    """A tool of verifiers in the OpenAI format."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
