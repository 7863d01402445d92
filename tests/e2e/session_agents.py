"""Agents that a user could write, with the client packages of both protocols; `forget` makes every third compact."""

import shutil
from pathlib import Path
from typing import Any

FORGETS = 3


async def by_openai(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """Ask twice, and streamed a third time; every third agent forgets what was said before that."""
    from openai import AsyncOpenAI

    messages: list[Any] = [*sample.messages]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for question in ("sure?", "so?"):
            answer = await client.chat.completions.create(model="tiny", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": question})
        if sample.index % FORGETS == 0:
            messages = [*sample.messages]
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        last = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return credit(last, sample.label)


async def by_anthropic(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """The same by Anthropic's protocol, with a system prompt."""
    from anthropic import AsyncAnthropic

    messages: list[Any] = [*sample.messages]
    asked: Any = {"model": "tiny", "max_tokens": 100, "system": "add."}
    async with AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
        for question in ("sure?", "so?"):
            answer = await client.messages.create(**asked, messages=messages)
            messages.append({"role": "assistant", "content": answer.content})
            messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
        if sample.index % FORGETS == 0:
            messages = [*sample.messages]
        async with client.messages.stream(**asked, messages=messages) as stream:
            last = "".join(block.text for block in (await stream.get_final_message()).content)
    return credit(last, sample.label)


async def in_turns(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """One of the two above, by the number of the sample."""
    agent = (by_openai, by_anthropic)[sample.index % 2]
    return await agent(args, sample, base_url, api_key)


async def asks_once(args: Any, sample: Any, base_url: str, api_key: str) -> None:
    """Ask what the row asks; the run's function gives the reward."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="tiny", messages=[*sample.messages])


def credit(text: str, label: str) -> float:
    return 1.0 if text.strip() == label else 0.5 * sum(c.isdigit() for c in text) / max(1, len(text))


def keep_weights(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """Keep what was pushed, for a test that scores tokens with it."""
    shutil.copytree(version_dir, Path(args.run_dir).parent / "pushed" / Path(version_dir).name)
