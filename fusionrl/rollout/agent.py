"""An agent that calls tools, as a generate function: turns of the model, and of tools between them.

    --custom-generate-function-path fusionrl.rollout.agent.generate --apply-chat-template --tools-path my.module.tools

Tokens in, tokens out: each request is the tokens of all turns so far, exactly as they were sampled. What tools say is
rendered by the chat template, appended after the sampled turn, and never trained on. The pieces (`begin`, `run_agent`,
`append_text`, `append_messages`, and `generate_turn` of the default rollout) are the building blocks of a user's own
agent.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionrl.base import cpu_wing
from fusionrl.config.hooks import call_hook, user_code
from fusionrl.data.columns import PromptColumns
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef
from fusionrl.data.prompts import render_prompt
from fusionrl.data.render import tokens_after_assistant, tools_of
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import add_images
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.client import Generation
from fusionrl.observe.spans import part
from fusionrl.rollout.generate import (
    SamplingParams,
    clear_response,
    generate_turn,
    note_no_room,
    prompt_tokens,
    room,
)
from fusionrl.rollout.image_requests import may_not_return, with_images
from fusionrl.rollout.tools import PythonTool, Tool, ToolAnswer, ToolError, tool_name
from fusionrl.rollout.types import NO_ROOM_AFTER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def generate(args: Namespace, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """One sample with the tools of --tools-path."""
    tools = call_hook("tools_path", args.tools_path, args, sample) if args.tools_path else [PythonTool()]
    return await run_agent(args, sample, sampling_params, tools or ())


async def run_agent(args: Namespace, sample: Sample, sampling_params: SamplingParams, tools: Sequence[Tool]) -> Sample:
    """Turns of the model and of `tools`, until the model answers without a call or a limit is reached.

    Without tools there is one turn, in which nothing is read as a call.

    COMPLETED is an answer without calls; TRUNCATED a turn that was cut off, calls in the last of --max-turns or next to
    a placeholder of an image (`generate_turn`), or an answer of tools that leaves no room. `sample.metadata` counts
    `num_turns`, `num_tool_calls` and `num_tool_errors`.
    Raises ValueError if the prompt has no messages, or the chat template cannot render tools' answers.
    """
    tokenizer = load_tokenizer(args.hf_checkpoint)
    schemas = [tool.schema for tool in tools]
    begin(args, sample, schemas)
    sample.metadata.update(num_turns=0, num_tool_calls=0, num_tool_errors=0)
    while True:
        answer = await generate_turn(args, sample, sampling_params)
        if answer is None:
            return sample
        sample.metadata["num_turns"] += 1
        if sample.status != Sample.Status.COMPLETED or not schemas:
            return sample
        end_token = end_of_turn(answer)
        text_tokens = answer.tokens[:-1] if end_token is not None else answer.tokens
        _, calls = await parse_tool_calls(
            args, tokenizer, schemas, tokenizer.decode(text_tokens, skip_special_tokens=False)
        )
        if not calls:
            return sample
        sample.metadata["num_tool_calls"] += len(calls)
        if sample.metadata["num_turns"] == args.max_turns or may_not_return(sample):
            sample.status = Sample.Status.TRUNCATED
            return sample
        start = time.monotonic_ns()
        results = await asyncio.gather(
            *(call_tool(tools, call, args.tools_path, args.tool_timeout_s) for call in calls)
        )
        part("tool", start, calls=len(calls))
        images: list[ImageRef] = []
        if any(result.images for result in results):  # to decode them takes long
            results, images = await asyncio.to_thread(take_images, args, sample, results)
        sample.metadata["num_tool_errors"] += sum(result.is_error for result in results)
        messages = [
            {
                "role": "tool",
                "tool_call_id": f"call{number:05d}",  # nine characters, as Mistral's templates demand
                "name": call.name,
                "content": _content(result, plain_text(tokenizer, result.text, args.max_tool_response_len)),
            }
            for number, (call, result) in enumerate(zip(calls, results, strict=True))
        ]
        if not append_messages(args, sample, sampling_params, messages, images, end_token):
            return sample


def take_images(
    args: Namespace, sample: Sample, results: Sequence[ToolResult]
) -> tuple[list[ToolResult], list[ImageRef]]:
    """Take the images of tools' answers into the store of images; an answer with one that cannot be used is an error.

    Returns the answers, and references to their images in order. Raises ValueError if the model gets no images.
    """
    kept, refs = [], list[ImageRef]()
    given = sum(place >= sample.prompt_length for place, _ in sample.image_spans)
    for result in results:
        try:
            if given + len(refs) + len(result.images) > args.max_tool_images:
                raise ToolError(f"there may be no more than {args.max_tool_images} images")
            refs += [_taken(image) for image in result.images]
            kept.append(result)
        except ToolError as error:
            kept.append(ToolResult(f"error: {error}", True))
    return kept, refs


def _taken(image: object) -> ImageRef:
    if IMAGES.processor is None:
        raise ValueError("a tool has answered with an image, but the model gets none: give --multimodal-keys")
    from fusionrl.data.processor import as_ref

    try:
        return as_ref(image, IMAGES.processor)
    except ValueError as error:
        raise ToolError(str(error)) from error


def _content(result: ToolResult, text: str) -> str | list[dict[str, str]]:
    """Content of a tool's message: its text, behind its images if it has any."""
    if not result.images:
        return text
    return [{"type": "image"} for _ in result.images] + ([{"type": "text", "text": text}] if text else [])


# ------------------------------------------------------------------------------------------------ the sample
def begin(args: Namespace, sample: Sample, schemas: Sequence[Mapping[str, object]] | None = None) -> None:
    """Put the prompt's tokens into the sample. A row's own tools (--tool-key) are in its prompt already.

    Raises ValueError if there are tools, but the prompt is not a list of messages under a chat template.
    """
    if schemas and tools_of(sample.metadata) is None:
        if sample.messages is None:
            raise ValueError("an agent's tools go into the prompt by the chat template: add --apply-chat-template")
        columns = PromptColumns("", apply_chat_template=True, chat_template_kwargs=args.apply_chat_template_kwargs)
        sample.prompt = render_prompt(sample.messages, load_tokenizer(args.hf_checkpoint), columns, schemas).text
        sample.prompt_tokens = None
        sample.prompt_tokens = prompt_tokens(args, sample)
        sample.metadata["tools"] = schemas
    if sample.response_length:  # aborted in an earlier rollout (--partial-rollout): its turns are not continued
        clear_response(sample)
        sample.metadata.pop(NO_ROOM_AFTER, None)
    sample.tokens = prompt_tokens(args, sample)


def append_text(args: Namespace, sample: Sample, sampling_params: SamplingParams, text: str) -> bool:
    """Append text of an environment as it stands; see `append_tokens`."""
    tokens = load_tokenizer(args.hf_checkpoint).encode(text, add_special_tokens=False)
    return append_tokens(args, sample, sampling_params, tokens, text)


def append_messages(
    args: Namespace,
    sample: Sample,
    sampling_params: SamplingParams,
    messages: Sequence[Mapping[str, object]],
    images: Sequence[ImageRef] = (),
    end_token: int | None = None,
) -> bool:
    """Append messages of tools or of a user, as the chat template renders them behind the model's turn.

    images     those of the parts `{"type": "image"}` in the messages' content, in order
    end_token  the token by which the model ended its turn (`end_of_turn`)

    Returns as `append_tokens`. Raises ValueError if the template cannot render them.
    """
    tokenizer = load_tokenizer(args.hf_checkpoint)
    tokens = tokens_after_assistant(
        messages,
        tokenizer,
        end_token=end_token,
        template_kwargs=args.apply_chat_template_kwargs,
        tools=tools_of(sample.metadata),
    )
    try:
        whole = with_images(tokens, images, sample.num_tokens)
    except ValueError as error:
        raise ValueError(
            f"the chat template of {args.hf_checkpoint} does not write images of tools: {error}"
        ) from error
    if not append_tokens(args, sample, sampling_params, whole.ids, tokenizer.decode(tokens)):
        return False
    add_images(sample, whole.spans)
    return True


def append_tokens(
    args: Namespace, sample: Sample, sampling_params: SamplingParams, tokens: Sequence[int] | np.ndarray, text: str
) -> bool:
    """Append tokens that the model did not sample: mask 0, log-prob 0, and the weight version of the token before.

    Where they would leave no room for another turn, nothing is appended, the sample is TRUNCATED, and False returned.
    """
    if len(tokens) >= room(args, sample, sampling_params):
        note_no_room(sample)
        sample.status = Sample.Status.TRUNCATED
        return False
    sample.append_response_tokens(args, tokens=tokens, trainable=False, text=text)
    return True


def end_of_turn(answer: Generation) -> int | None:
    """The token by which the model ended its turn; None where a stop string or a limit did."""
    matched = (answer.meta_info.get("finish_reason") or {}).get("matched")
    if isinstance(matched, int) and len(answer.tokens) and answer.tokens[-1] == matched:
        return matched
    return None


def plain_text(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str:
    """`text` of at most `max_tokens` tokens, in which special tokens are spelled so that they are none.

    Otherwise a tool's answer could end its own turn and speak in another role.
    """
    text = spelled_out(tokenizer, text)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) <= max_tokens:
        return text
    return tokenizer.decode(tokens[:max_tokens]).rstrip("�") + f"\n[cut: {max_tokens} of {len(tokens)} tokens]"


def spelled_out(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return `text` in which special tokens are spelled so that they are none."""
    for token in tokenizer.get_added_vocab():
        if len(token) > 2 and token.strip() == token:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


# ------------------------------------------------------------------------------------------------ tool calls
@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; `arguments` is JSON. `error` says what is wrong with one that cannot be read."""

    name: str
    arguments: str = "{}"
    error: str | None = None


@dataclass(frozen=True)
class ToolResult:
    """What a tool has answered."""

    text: str
    is_error: bool = False
    images: tuple[object, ...] = ()


async def call_tool(tools: Sequence[Tool], call: ToolCall, tools_path: str | None, timeout_s: float) -> ToolResult:
    """Run one call. Return the model's mistakes to the model; raise a tool's own errors.

    tools_path  --tools-path, for messages; None: the tools are a user's generate function's
    timeout_s   limit of one call

    Raises HookError for what a tool of --tools-path raised.
    """
    import jsonschema

    by_name = {tool_name(tool): tool for tool in tools}
    if call.error is not None:
        return ToolResult(f"error: {call.error}", True)
    if call.name not in by_name:
        return ToolResult(f"error: there is no tool {call.name!r}; there are {sorted(by_name)}", True)
    tool = by_name[call.name]
    try:
        arguments = json.loads(call.arguments)
        json.dumps(arguments, ensure_ascii=False).encode()  # no tokenizer takes half a pair of surrogates
        jsonschema.validate(arguments, {"additionalProperties": False} | tool.schema["function"]["parameters"])
    except (ValueError, RecursionError, jsonschema.ValidationError) as error:
        reason = error.message if isinstance(error, jsonschema.ValidationError) else str(error)
        return ToolResult(f"error: wrong arguments for {call.name}: {reason}", True)
    # An error of a generate function's own tool is named with that function.
    where = f"--tools-path {tools_path}: the tool {call.name!r}"
    with nullcontext() if tools_path is None else user_code(where, tools_path):
        try:
            async with asyncio.timeout(timeout_s) as limit:
                answer = await tool(**arguments)
            if isinstance(answer, ToolAnswer):
                return ToolResult(answer.text, images=tuple(answer.images))
            return ToolResult(answer)
        except ToolError as error:
            return ToolResult(f"error: {error}", True)
        except TimeoutError:
            if not limit.expired():  # the tool's own
                raise
            return ToolResult(f"error: {call.name} took longer than {timeout_s:g} s", True)


async def parse_tool_calls(
    args: Namespace, tokenizer: object, schemas: Sequence[Mapping[str, object]], text: str
) -> tuple[str, list[ToolCall]]:
    """Return (content next to the calls, the calls) of a turn by SGLang's parser; an unreadable call has an `error`."""
    name = await asyncio.to_thread(parser_name, args.tool_call_parser, args.hf_checkpoint)  # the import takes seconds
    from sglang.srt.entrypoints.openai.protocol import Tool as Schema
    from sglang.srt.environ import envs
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser([Schema(**schema) for schema in schemas], name, tokenizer=tokenizer)
    calls: list[Any] = []
    if not parser.has_tool_call(text):
        return text, []
    content, reason = text, "it is not complete, or not in the format described"
    # The model gets an error for an unknown tool. An exception would leave the variable in the environment.
    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        try:
            content, calls = parser.parse_non_stream(text)
        except Exception as error:  # the text is a model's, and the parsers of thirty formats raise all kinds
            reason = f"{type(error).__name__}: {error}"
    if not calls:
        return text, [ToolCall("", error=f"the tool call cannot be read: {reason}")]
    return content, [ToolCall(call.name or "", call.parameters) for call in calls]


@functools.cache
def parser_name(requested: str, folder: str) -> str:
    """--tool-call-parser, or for auto what SGLang finds in the chat template of `folder`.

    Raises ValueError for an unknown parser or a template without tool calls, or if SGLang is not installed.
    """
    cpu_wing.install_stand_ins()
    try:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.template_detection import detect_tool_call_parser
    except ImportError as error:
        raise ValueError(f"--tool-call-parser {requested}: it needs the package sglang ({error})") from error
    known = sorted(FunctionCallParser.ToolCallParserEnum)
    name = requested
    if requested == "auto":
        tokenizer = load_tokenizer(folder)
        template = tokenizer.chat_template or ""
        name = detect_tool_call_parser(template, tokenizer)
        if name is None and "<tool_call>" in template and '"arguments"' in template:
            name = "qwen25"  # JSON within tags, Qwen's and Hermes': SGLang's rules ask for Qwen3's thoughts as well
        if name is None:
            raise ValueError(
                f"--tool-call-parser auto: the chat template of {folder} has no tool calls that SGLang knows; choose"
                f" one of {', '.join(known)}"
            )
    if name not in known:
        raise ValueError(f"--tool-call-parser {requested}: unknown; known are {', '.join(known)}")
    return name
