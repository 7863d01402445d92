"""Agents of the session tests, as their authors write them: with the client packages, and with bare HTTP."""

import asyncio
import json
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

TOOL = {
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


def look_up(town: str) -> str:
    return f"{town}: rain"


def openai(base_url: str, api_key: str) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def anthropic(base_url: str, api_key: str) -> Any:
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0)


async def _chat(client: Any, stream: bool) -> float:
    """Turns with tools until one has no call; the reward is the number of the turns."""
    asked: Any = {"model": "any", "tools": [{"type": "function", "function": TOOL}], "temperature": 0.3}
    messages: list[Any] = [{"role": "user", "content": "Is it wet?"}]
    turns = 0
    async with client:
        while True:
            turns += 1
            if stream:
                async with client.chat.completions.stream(messages=messages, **asked) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(messages=messages, **asked)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float(turns)
            for call in message.tool_calls:
                result = look_up(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def with_openai(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    return await _chat(openai(base_url, api_key), stream=False)


async def with_openai_stream(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    return await _chat(openai(base_url, api_key), stream=True)


async def with_anthropic(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """The same conversation by the other protocol; every second turn is streamed."""
    tool: Any = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Is it wet?"}]}]
    turns = 0
    async with anthropic(base_url, api_key) as client:
        while True:
            asked: Any = {"model": "any", "max_tokens": 900, "messages": messages, "tools": [tool]}
            if turns % 2:
                async with client.messages.stream(**asked) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            turns += 1
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            if answer.stop_reason != "tool_use":
                return float(turns)
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": look_up(**block.input)}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})


async def with_responses(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """The same conversation by OpenAI's responses; every second turn is streamed."""
    items: list[Any] = [{"role": "user", "content": "Is it wet?"}]
    turns = 0
    async with openai(base_url, api_key) as client:
        while True:
            asked: Any = {"model": "any", "input": items, "tools": [{"type": "function", **TOOL}], "store": False}
            if turns % 2:
                async with client.responses.stream(**asked) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            turns += 1
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return float(turns)
            for call in calls:
                result = look_up(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


async def with_anthropic_runner(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """The same by the loop of the package anthropic, which asks for a thread first."""
    from anthropic import beta_async_tool

    @beta_async_tool
    async def weather(town: str) -> str:
        """The weather of a town."""
        return look_up(town)

    async with anthropic(base_url, api_key) as client:
        question: Any = [{"role": "user", "content": "Is it wet?"}]
        loop = client.beta.messages.tool_runner(model="any", max_tokens=900, tools=[weather], messages=question)
        return float(len([turn async for turn in loop]))


async def with_openai_agents(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """The same by the package openai-agents, which asks by responses."""
    from agents import Agent, FunctionTool, OpenAIResponsesModel, RunConfig, Runner

    async def run(_: Any, arguments: str) -> str:
        return look_up(**json.loads(arguments))

    tool = FunctionTool(TOOL["name"], TOOL["description"], TOOL["parameters"], run, strict_json_schema=False)
    async with openai(base_url, api_key) as client:
        model = OpenAIResponsesModel(model="any", openai_client=client)
        done = await Runner.run(
            Agent(name="weather", model=model, tools=[tool]), "Is it wet?", run_config=RunConfig(tracing_disabled=True)
        )
    return float(len(done.raw_responses))


def blocking(args: Any, sample: Any, base_url: str, api_key: str) -> None:
    """A plain function with a client that blocks; what it writes on the sample stays."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Is it wet?"}])
    sample.metadata["heard"] = answer.choices[0].message.content
    sample.my_note = {"finish": answer.choices[0].finish_reason}


async def blocking_its_loop(args: Any, sample: Any, base_url: str, api_key: str) -> None:
    """The mistake of an async function with a client that blocks."""
    blocking(args, sample, base_url, api_key)


async def compacting(args: Any, sample: Any, base_url: str, api_key: str) -> None:
    """Two turns, then a history of its own, then one more turn of the first conversation."""
    async with openai(base_url, api_key) as client:

        async def ask(messages: list[Any]) -> list[Any]:
            answer = await client.chat.completions.create(model="any", messages=messages)
            return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

        first = await ask([{"role": "user", "content": "Is it wet?"}])
        first = await ask([*first, {"role": "user", "content": "And in Rome?"}])
        await ask([{"role": "system", "content": "So far: it rains."}, {"role": "user", "content": "Where?"}])
        await ask([*first, {"role": "user", "content": "Sure?"}])


async def until_full(args: Any, sample: Any, base_url: str, api_key: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it wet?"}]
    async with openai(base_url, api_key) as client:
        while True:
            answer = await client.chat.completions.create(model="any", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "Go on. " * 10})


async def broken_when_full(args: Any, sample: Any, base_url: str, api_key: str) -> None:
    from openai import BadRequestError

    with suppress(BadRequestError):
        await until_full(args, sample, base_url, api_key)
    raise KeyError("mine")


async def with_responses_stream(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """One turn, streamed; the client raises where a limit cut it."""
    client = openai(base_url, api_key)
    async with client, client.responses.stream(model="any", input="Is it wet?") as stream:
        return float(len((await stream.get_final_response()).output_text))


async def broken_when_cut(args: Any, sample: Any, base_url: str, api_key: str) -> None:
    await with_openai(args, sample, base_url, api_key)
    raise KeyError("mine")


async def with_anthropic_text(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """One turn, read as most agents read it."""
    question: Any = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "Is it wet?"}]}
    async with anthropic(base_url, api_key) as client:
        whole = await client.messages.create(**question)
        async with client.messages.stream(**question) as stream:
            streamed = await stream.get_final_message()
    block: Any = (whole.content[0], streamed.content[0])
    return float(len(block[0].text) + len(block[1].text))


async def slow(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    await with_openai(args, sample, base_url, api_key)
    await asyncio.sleep(60)
    return 1.0


def cancelled(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """A plain function whose own pool was shut down."""
    future: Future[float] = Future()
    future.cancel()
    return future.result()


async def broken(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    raise KeyError("mine")


async def no_reward(args: Any, sample: Any, base_url: str, api_key: str) -> Any:
    await with_openai(args, sample, base_url, api_key)
    return "good"
