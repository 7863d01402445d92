"""A session: what one agent asks for one sample, recorded token by token, in segments.

    request 1   system, user                                  segment 1 begins: its prompt is rendered
    request 2   system, user, assistant 1, tool               segment 1 continues: the tool's text is appended, mask 0
    request 3   system, a summary                             the agent rewrote its history: segment 2 begins
    request 4   system, user, assistant 1, tool, assistant 2, user      segment 1 continues

A segment becomes a sample. The tokens of its turns are those that were sampled: what the assistant says in a request is
compared with what was recorded, and never tokenized.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import secrets
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fusionrl.data.columns import PromptColumns
from fusionrl.data.findings import FindingError
from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import Expanded
from fusionrl.data.prompts import render_prompt
from fusionrl.data.render import render_messages, tokens_after_assistant
from fusionrl.data.sample import Sample
from fusionrl.data.sample_images import add_images
from fusionrl.data.tokenizer import load_tokenizer
from fusionrl.engines.client import Generation
from fusionrl.engines.http import EndpointError
from fusionrl.rollout.agent import ToolCall, end_of_turn, parse_tool_calls, spelled_out
from fusionrl.rollout.generate import SamplingParams, clear_response, generate_turn, note_no_room, prompt_tokens, room
from fusionrl.rollout.image_requests import with_images
from fusionrl.rollout.sessions.messages import (
    Call,
    Message,
    Pictures,
    Refused,
    TurnReply,
    TurnRequest,
    images_of,
    objects,
    same,
    without_data,
)
from fusionrl.rollout.types import SESSION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NO_ROOM = "leave no room for an answer"  # said of a full context
# Words by which the client packages raise where a limit cut a turn: openai-agents, and two streams of openai.
CUT = ("incomplete_details", "Didn't receive a `response.completed` event", "the length limit was reached")
# Fields that a segment sets on its sample; the others come from the row and from the agent.
_OF_SEGMENT = (
    *("prompt", "prompt_tokens", "tokens", "response", "response_length", "loss_mask", "rollout_log_probs"),
    *("weight_versions", "teacher_log_probs", "rollout_routed_experts", "image_spans", "multimodal_inputs"),
    "status",
)
_BY_FLAGS = (
    "it is ignored, for tokens that are trained on are sampled by the run's flags (--rollout-temperature and its like)"
)
_told: set[str] = set()  # fields of requests of which the log has spoken
FOLLOWS = ("user", "tool", "system")  # who may speak after the model and leave the conversation the same
_GUARDED = ("user", "tool")  # who may have written special tokens that are not theirs to write


@dataclass
class Segment:
    """A conversation that was answered at least once."""

    sample: Sample  # its tokens, masks, log-probs and versions
    messages: list[Message]  # the conversation in its tokens; the last one is the model's
    tools: list[Message]
    template: Mapping[str, object] = field(default_factory=dict)  # keyword arguments of the chat template
    end_token: int | None = None  # by which the last turn ended; None where a stop string or a limit did
    num_turns: int = 0
    is_busy: bool = False  # a request is continuing it now


@dataclass
class Segments:
    """The segments of a session, the one that was answered last at the end."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, object]  # of the chat template, where a request has none of its own
    blank: Sample  # the sample before anything was generated
    all: list[Segment] = field(default_factory=list)

    def template_of(self, request: TurnRequest) -> Mapping[str, object]:
        """Return the keyword arguments of the chat template for a request.

        Whether a model thinks is `enable_thinking` in templates of Qwen and others, `thinking` in DeepSeek's; how much,
        `reasoning_effort` in those of GPT-OSS. Raises ValueError if the template has no argument for a wish of the
        request.
        """
        kwargs = {**self.template_kwargs, **request.template}
        thinks = request.thinks
        if request.effort is not None and self._reads("reasoning_effort", "low", "high"):
            kwargs["reasoning_effort"] = request.effort
        elif request.effort is not None and thinks is None:
            thinks = request.effort != "none"
        if thinks is not None:
            switch = next((name for name in ("enable_thinking", "thinking") if self._reads(name, True, False)), None)
            if switch is None:
                raise ValueError(
                    f"the chat template has no argument that switches thoughts {'on' if thinks else 'off'}"
                    " (enable_thinking, thinking, reasoning_effort): leave out thinking, effort and reasoning_effort"
                )
            kwargs[switch] = thinks
        if request.verbosity is not None:
            if not self._reads("verbosity", "low", "high"):
                raise ValueError("the chat template has no argument verbosity: leave it out")
            kwargs["verbosity"] = request.verbosity
        return kwargs

    def _reads(self, name: str, first: object, second: object) -> bool:
        """Return whether another value of an argument makes the chat template render otherwise, or refuse."""
        probe = [{"role": "user", "content": "?"}]

        def text(kwargs: Mapping[str, object]) -> str:
            try:
                return render_messages(
                    self.tokenizer, probe, template_kwargs=kwargs, for_answer=True, may_lose=None
                ).text
            except FindingError:
                return "refused"

        return text({**self.template_kwargs, name: first}) != text({**self.template_kwargs, name: second})

    def continued_by(self, turn_request: TurnRequest, template: Mapping[str, object]) -> Segment | None:
        """Return the longest segment that a request continues; None where the agent tells another history.

        Other tools, or other arguments of the template, are another history, too: the beginning is rendered otherwise.
        One that is being answered is none: a second request at the same time has a history of its own.
        """
        messages = turn_request.messages

        def is_continued(segment: Segment) -> bool:
            done = len(segment.messages)
            is_same = segment.tools == turn_request.tools and segment.template == template
            follow = len(messages) > done and all(message["role"] in FOLLOWS for message in messages[done:])
            return not segment.is_busy and is_same and follow and same(messages[:done], segment.messages)

        return max(filter(is_continued, self.all), key=lambda segment: len(segment.messages), default=None)

    def added(self, segment: Segment, messages: Sequence[Message]) -> tuple[Expanded, str]:
        """Return the tokens of what is new in `messages`, from the end of the last turn to the next turn, and the text.

        Raises ValueError if the chat template cannot render it after a turn of the assistant.
        """
        calls = objects(segment.messages[-1].get("tool_calls") or [], "")
        names = {call["id"]: f["name"] for call in calls if isinstance(f := call["function"], dict)}
        said = messages[len(segment.messages) :]
        new = [self._guarded(message) for message in said]
        for message in new:
            if message["role"] == "tool":
                message["name"] = names.get(message["tool_call_id"], "tool")
        tokens = tokens_after_assistant(
            new,
            self.tokenizer,
            end_token=segment.end_token,
            template_kwargs=segment.template,
            tools=segment.tools or None,
        )
        whole = with_images(tokens, images_of(said), segment.sample.num_tokens)
        return whole, self.tokenizer.decode(tokens)

    def begun(self, turn_request: TurnRequest, template: Mapping[str, object]) -> Sample:
        """Return a sample whose prompt is what a request asks.

        Raises ValueError if the tokenizer has no chat template, or it refuses the messages.
        """
        sample = copy.deepcopy(self.blank)
        columns = PromptColumns("", apply_chat_template=True, chat_template_kwargs=dict(template))
        guarded = [self._guarded(message) for message in turn_request.messages]
        sample.prompt = render_prompt(guarded, self.tokenizer, columns, turn_request.tools or None).text
        sample.prompt_tokens = None
        tokens = self.tokenizer.encode(sample.prompt, add_special_tokens=False)
        whole = with_images(tokens, images_of(turn_request.messages))
        sample.tokens, sample.image_spans, sample.multimodal_inputs = whole.ids, whole.spans, None
        return sample

    def _guarded(self, message: Message) -> Message:
        """Return a copy in which a tool's answer, say, cannot end its own turn and speak in another role."""
        message = without_data(message)
        if message["role"] not in _GUARDED:
            return message
        content = message["content"]
        if isinstance(content, list):
            parts = [
                part | ({"text": spelled_out(self.tokenizer, str(part["text"]))} if "text" in part else {})
                for part in content
            ]
            return {**message, "content": parts}
        return {**message, "content": spelled_out(self.tokenizer, str(content))}

    def keep(self, segment: Segment) -> None:
        """Put a segment that was answered just now at the end."""
        if segment in self.all:
            self.all.remove(segment)
        self.all.append(segment)


class Session:
    """Answers the requests of one agent, and makes samples of them.

    base_url  for the clients of both protocols: http://127.0.0.1:PORT/sessions/ID/v1
    api_key   which they must send; it opens this session alone
    """

    def __init__(self, args: Namespace, sample: Sample, sampling_params: SamplingParams) -> None:
        """`args`, `sample` and `sampling_params` as a generate function gets them.

        Raises ValueError if the tokenizer has no chat template.
        """
        tokenizer = load_tokenizer(args.hf_checkpoint)
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("sessions speak by the chat template; the tokenizer of --hf-checkpoint has none")
        self._args, self._sample, self._params = args, sample, dict(sampling_params)
        blank = copy.deepcopy(sample)
        clear_response(blank)
        self._pictures = Pictures()
        self._segments = Segments(tokenizer, args.apply_chat_template_kwargs or {}, blank)
        self.id, self.api_key = secrets.token_hex(8), secrets.token_hex(24)
        self.base_url = ""
        self.model = args.hf_checkpoint.rstrip("/").rpartition("/")[2]
        self.loop = asyncio.get_running_loop()
        self.failure: Exception | None = None  # why the engines gave no answer; None once they gave one again
        self.lacks_room = False  # the last request was refused because the context was full
        self.is_cut = False  # a limit cut the turn that was answered last
        self.is_aborted = False  # the rollout has ended before the agent
        self._has_ended = False
        self._num_calls = 0
        self._tasks: set[asyncio.Task[object]] = set()

    # -------------------------------------------------------------------------------- requests
    async def answer(self, turn_request: TurnRequest) -> TurnReply:
        """Let the model answer.

        Raises Refused if no room is left for a turn, the template cannot render the messages, or the session has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await self._answer(turn_request)
        except asyncio.CancelledError:
            if self._has_ended:
                raise Refused("the session has ended", 400, "session_ended") from None
            raise
        finally:
            self._tasks.discard(task)

    async def _answer(self, turn_request: TurnRequest) -> TurnReply:
        if self._has_ended or self.is_aborted:
            raise Refused("the session has ended", 400, "session_ended")
        self._check_constraints(turn_request)
        _tell_once(turn_request.ignored, _BY_FLAGS)
        segments = self._segments
        if IMAGES.processor is None:
            messages = self._pictures.taken(turn_request.messages)
        else:  # to decode them takes long
            messages = await asyncio.to_thread(self._pictures.taken, turn_request.messages)
        turn_request = replace(turn_request, messages=messages)
        try:
            template = segments.template_of(turn_request)
            segment = segments.continued_by(turn_request, template)
            if segment is None:
                segment = Segment(segments.begun(turn_request, template), [], turn_request.tools, template)
                added, text = None, ""
            else:
                added, text = segments.added(segment, turn_request.messages)
        except (ValueError, TypeError) as error:  # a TypeError: text that is not Unicode
            raise Refused(str(error)) from error
        params = dict(self._params)
        if turn_request.stop:
            params["stop"] = [*(params.get("stop") or []), *turn_request.stop]
        self._check_room(segment, 0 if added is None else len(added.ids), params)
        # A copy: a client that hangs up leaves the segment as it was. Arrays are replaced, never written.
        sample = copy.copy(segment.sample)
        if added is not None:
            sample.append_response_tokens(tokens=added.ids, trainable=False, text=text)
            add_images(sample, added.spans)
        segment.is_busy = True
        try:
            reply, answer = await self._turn(turn_request, sample, params)
        finally:
            segment.is_busy = False
        segment.sample, segment.end_token = sample, end_of_turn(answer)
        segment.messages = [*turn_request.messages, reply.message()]
        segment.num_turns += 1
        segments.keep(segment)
        self.failure, self.lacks_room, self.is_cut = None, False, reply.finish == "length"
        return reply

    async def _turn(
        self, turn_request: TurnRequest, sample: Sample, params: SamplingParams
    ) -> tuple[TurnReply, Generation]:
        num_prompt_tokens = sample.num_tokens
        try:
            answer = await generate_turn(self._args, sample, params, longest=turn_request.longest)
            if answer is None and sample.status == Sample.Status.TRUNCATED:
                self.lacks_room = True
                reason = f"the placeholder of an image that the model has written, and what follows, {NO_ROOM}"
                raise Refused(f"prompt is too long: {reason}", 400, "context_length_exceeded")
            if answer is None or sample.status == Sample.Status.ABORTED:
                self.is_aborted = True
                raise Refused("the rollout has ended, and with it the session", 400, "session_ended")
            return await self._said(turn_request, answer, num_prompt_tokens), answer
        except (RuntimeError, TimeoutError, OSError, ValueError) as error:
            if isinstance(error, EndpointError) and error.status < 500:  # the engine's own limits, of its context say
                raise Refused(str(error), 400) from error
            self.failure = error
            raise Refused(f"the engines gave no answer: {error!r}", 500) from error

    def _check_constraints(self, turn_request: TurnRequest) -> None:
        if not self._args.agent_free_sampling and turn_request.constraints:
            raise Refused(f"{turn_request.constraints[0]}; --agent-free-sampling accepts it, and samples freely")
        names = tuple(constraint.partition(":")[0].partition(" ")[0] for constraint in turn_request.constraints)
        _tell_once(names, "by --agent-free-sampling the answer is sampled freely")

    def _check_room(self, segment: Segment, num_added: int, params: SamplingParams) -> None:
        left = room(self._args, segment.sample, params)
        longest = self._args.rollout_max_prompt_len
        is_too_long = not segment.messages and longest is not None and segment.sample.num_tokens > longest
        if num_added < left and not (is_too_long and self._args.rollout_max_context_len is None):
            return
        count = segment.sample.num_tokens + num_added
        limit = longest if is_too_long and left > 0 else segment.sample.num_tokens + left
        self.lacks_room = True
        if segment.messages:
            note_no_room(segment.sample)
        raise Refused(
            f"prompt is too long: {count} tokens {NO_ROOM} within this model's maximum context length"
            f" of {limit} tokens (--rollout-max-context-len)",
            400,
            "context_length_exceeded",
        )

    async def _said(self, turn_request: TurnRequest, answer: Generation, num_prompt_tokens: int) -> TurnReply:
        """A turn as the agent reads it: a call that cannot be read is text, as with other servers."""
        tokenizer = self._segments.tokenizer
        tokens = answer.tokens if end_of_turn(answer) is None else answer.tokens[:-1]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        matched = (answer.meta_info.get("finish_reason") or {}).get("matched")
        stop = matched if isinstance(matched, str) and answer.finish_reason == "stop" else None
        if stop is not None:
            text = text.partition(stop)[0]
        calls: list[Call] = []
        if turn_request.tools and turn_request.reads_calls and answer.finish_reason != "length":
            full_text = tokenizer.decode(tokens, skip_special_tokens=False)
            rest, parsed = await parse_tool_calls(self._args, tokenizer, turn_request.tools, full_text)
            if parsed and all(call.error is None and call.name and _is_json(call) for call in parsed):
                text = rest
                # Nine characters, as Mistral's templates demand.
                numbered = enumerate(parsed, start=self._num_calls)
                calls = [Call(f"call{number:05d}", call.name, call.arguments) for number, call in numbered]
                self._num_calls += len(calls)
        return TurnReply(
            text=text,
            calls=tuple(calls),
            finish="tool_calls" if calls else "length" if answer.finish_reason == "length" else "stop",
            stop_string=stop if stop in turn_request.stop and not calls else None,
            num_prompt_tokens=num_prompt_tokens,
            num_cached=min(answer.cached_tokens, num_prompt_tokens),
            num_sampled=len(answer.tokens),
        )

    def count_tokens(self, turn_request: TurnRequest) -> int:
        """Return the tokens of the prompt of a request, as a segment of its own."""
        turn_request = replace(turn_request, messages=self._pictures.taken(turn_request.messages))
        try:
            return self._segments.begun(turn_request, self._segments.template_of(turn_request)).num_tokens
        except (ValueError, TypeError) as error:  # a TypeError: text that is not Unicode
            raise Refused(str(error)) from error

    # -------------------------------------------------------------------------------- samples
    async def end(self) -> None:
        """End what is under way; nothing is answered any more."""
        self._has_ended = True
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def samples(self, reward: float | dict[str, object] | None = None, error: str | None = None) -> list[Sample]:
        """Return a sample for each segment, in the order of their last turns; the first is the row's sample itself.

        All have `reward`, the row's fields, and what the agent wrote on the row's sample. COMPLETED and TRUNCATED are
        those of a segment's last turn; with an `error` (a time limit, say), or where the last request found no room,
        the last segment is TRUNCATED. ABORTED where the rollout has ended. A session without an answer makes one FAILED
        sample. Raises what says why the engines answered nothing from some request on: RuntimeError, TimeoutError,
        OSError or ValueError.
        """
        if self.failure is not None:
            raise self.failure
        sample, segments = self._sample, self._segments.all
        if self.is_aborted or not segments:
            vars(sample).update({name: copy.copy(vars(self._segments.blank)[name]) for name in _OF_SEGMENT})
            sample.status = Sample.Status.ABORTED
            if self.is_aborted:
                return [sample]
            sample.status = Sample.Status.FAILED
            entry = {"error": error or "the agent sent no request that was answered", "num_segments": 0}
            sample.metadata = {**(sample.metadata or {}), SESSION: entry}
            if sample.prompt_tokens is not None or isinstance(sample.prompt, str):
                sample.tokens = prompt_tokens(self._args, sample)
            return [sample]
        samples = [sample, *(copy.deepcopy(sample) for _ in segments[1:])]
        for number, (copied, segment) in enumerate(zip(samples, segments, strict=True)):
            vars(copied).update({name: vars(segment.sample)[name] for name in _OF_SEGMENT})
            entry = {"segment": number, "num_segments": len(segments), "num_turns": segment.num_turns}
            copied.metadata = {**(segment.sample.metadata or {}), **(copied.metadata or {}), SESSION: entry}
            copied.reward = copy.copy(reward)
        if error is not None:
            samples[-1].metadata[SESSION]["error"] = error
        if error is not None or self.lacks_room:
            samples[-1].status = Sample.Status.TRUNCATED
        return samples


@asynccontextmanager
async def open_session(args: Namespace, sample: Sample, sampling_params: SamplingParams) -> AsyncIterator[Session]:
    """Open a session for one sample; requests are answered within the block.

    async with open_session(args, sample, sampling_params) as session:
        reward = await my_agent(session.base_url, session.api_key)
    return session.samples(reward)
    """
    session = Session(args, sample, sampling_params)
    from fusionrl.rollout.sessions.server import process_server  # aiohttp's server: 0.1 s that few processes need

    server = await asyncio.to_thread(process_server)
    server.add(session)
    try:
        yield session
    finally:
        server.remove(session)
        await session.end()


def _is_json(call: ToolCall) -> bool:
    """Return whether a call has an object for arguments, and can be sent: no NaN, and no half of a surrogate pair."""
    try:
        arguments = json.loads(call.arguments)
        json.dumps([call.name, arguments], allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(arguments, dict)


def _tell_once(names: tuple[str, ...], description: str) -> None:
    """Say once of each field of agents' requests what becomes of it."""
    for name in names:
        if name not in _told:
            _told.add(name)
            logger.warning("an agent's request sets %s: %s", name, description)
