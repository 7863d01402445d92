"""Agents of other packages that show images, by the client packages of three protocols."""

import base64
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import pytest
from PIL import Image

from fusionrl.data.sample import Sample
from fusionrl.rollout.sessions import open_session
from fusionrl.rollout.sessions.server import LONGEST_BODY
from fusionrl.rollout.sessions.session import NO_ROOM
from tests.rollout import engine as scripted
from tests.rollout.engine import Engine, Turn, call, needs
from tests.rollout.test_images import (  # noqa: F401
    IMAGE_TEXT,
    UNIT,
    apart,
    asking,
    check,
    noise,
    pixels,
    seeing,
    store,
)

pytestmark = needs("sglang", "PIL")


def png(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


async def shows(api: str, base_url: str, api_key: str, first: Image.Image, second: Image.Image) -> None:
    """Send an image with a question, and one behind the answer of a tool, by the client packages.

    OpenAI's chat has no images in messages of tools: agents send those as a user, and some servers read them there.
    """
    text, done = {"type": "text", "text": "Which?"}, {"type": "text", "text": "Drawn."}
    data = [png(image) for image in (first, second)]
    uris = [f"data:image/png;base64,{one}" for one in data]
    parameters = {"type": "object", "properties": {"what": {"type": "string"}}}
    function: Any = {"name": "draw", "parameters": parameters}
    if api == "anthropic":
        sources = [{"type": "base64", "media_type": "image/png", "data": one} for one in data]
        blocks = [{"type": "image", "source": source} for source in sources]
        messages: list[Any] = [{"role": "user", "content": [blocks[0], text]}]
        head: Any = {"model": "any", "tools": [{"name": "draw", "input_schema": parameters}]}
        async with pytest.importorskip("anthropic").AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
            use = await client.messages.create(max_tokens=300, messages=messages, **head)
            result = {"type": "tool_result", "tool_use_id": use.content[0].id, "content": [blocks[1], done]}
            messages += [{"role": "assistant", "content": use.content}, {"role": "user", "content": [result]}]
            usage = (await client.messages.create(max_tokens=300, messages=messages, **head)).usage
            count = await client.messages.count_tokens(messages=messages, **head)
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        return
    async with pytest.importorskip("openai").AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        if api == "openai-agents":
            agents = pytest.importorskip("agents")

            async def draw(_: Any, arguments: str) -> list[Any]:
                return [agents.ToolOutputImage(image_url=uris[1]), agents.ToolOutputText(text="Drawn.")]

            tool = agents.FunctionTool("draw", "Draw.", parameters, draw, strict_json_schema=False)
            model = agents.OpenAIResponsesModel(model="any", openai_client=client)
            shown = [{"type": "input_image", "image_url": uris[0]}, {"type": "input_text", "text": "Which?"}]
            asked = [{"role": "user", "content": shown}]
            config = agents.RunConfig(tracing_disabled=True)
            await agents.Runner.run(agents.Agent(name="a", model=model, tools=[tool]), asked, run_config=config)
            return
        if api == "responses":
            shown = [{"type": "input_image", "image_url": uri, "detail": "auto"} for uri in uris]
            items: list[Any] = [{"role": "user", "content": [shown[0], {"type": "input_text", "text": "Which?"}]}]
            head = {"model": "any", "tools": [{"type": "function", **function}]}
            called = (await client.responses.create(input=items, **head)).output[0]
            output = [shown[1], {"type": "input_text", "text": "Drawn."}]
            items += [called, {"type": "function_call_output", "call_id": called.call_id, "output": output}]
            await client.responses.create(input=items, **head)
            return
        parts = [{"type": "image_url", "image_url": {"url": uri, "detail": "low"}} for uri in uris]
        messages = [{"role": "user", "content": [parts[0], text]}]
        head = {"model": "any", "tools": [{"type": "function", "function": function}]}
        message = (await client.chat.completions.create(messages=messages, **head)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Drawn."}
        if api == "chat-tool":
            more = [result | {"content": [parts[1], done]}]
        else:
            more = [result, {"role": "user", "content": [parts[1]]}]
        messages += [message.model_dump(exclude_none=True), *more]
        await client.chat.completions.create(messages=messages, **head)


@pytest.fixture
def meet(seeing: str) -> Callable[..., tuple[Sample, Engine]]:  # noqa: F811
    """meet(agent, [turn, …]) -> (the one sample of its session, engine); agent(base_url, api_key) is a coroutine."""

    def start(agent: Callable[[str, str], Any], turns: list[Turn | str]) -> tuple[Sample, Engine]:
        flags = {"rollout_max_response_len": 900, "tool_call_parser": "qwen25", "image_transport": "data"}
        args, engine = scripted.prepare(seeing, turns, **flags)
        engine.image_unit = UNIT
        row = asking(seeing, noise(128, 128, 2))  # of which the agent shows nothing

        async def run() -> list[Sample]:
            async with open_session(args, row, scripted.sampling_params(args)) as session:
                await agent(session.base_url, session.api_key)
            return session.samples(1.0)

        (sample,) = engine.serve(args, run)
        return sample, engine

    return start


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("api", ["chat", "chat-tool", "responses", "openai-agents", "anthropic"])
def test_an_agent_of_somebody_else_s_shows_images(meet: Any, api: str) -> None:
    """In a question and behind the call of a tool; the second request continues the first's sample."""
    first, second = noise(64, 64), noise(96, 64, 1)
    said = [call("draw", what="it"), "Blue."]
    sample, engine = meet(lambda base_url, key: shows(api, base_url, key, first, second), said)
    check(sample, engine)
    assert [image.num_tokens for _, image in sample.image_spans] == [4, 6]
    for image, original in zip(sample.multimodal_inputs["images"], (first, second), strict=True):
        np.testing.assert_array_equal(np.asarray(image), pixels(original))
    assert sample.metadata["session"]["num_turns"] == 2
    assert sample.loss_mask.count(1) == sum(len(turn) + 1 for turn in said)
    tool = "Drawn." if api == "chat" else f"{IMAGE_TEXT}Drawn."
    user = f"<|im_end|>\n<|im_start|>user\n{IMAGE_TEXT}" if api == "chat" else ""
    between = f"\n<|im_start|>user\n<tool_response>\n{tool}\n</tool_response>{user}<|im_end|>\n"
    assert sample.response == f"{said[0]}{between}<|im_start|>assistant\n{said[1]}"


def test_a_sampled_placeholder_ends_a_session(meet: Any) -> None:
    """As a full context does: agents that know its words end, or begin anew."""

    async def agent(base_url: str, api_key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "Hm?"}]
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(base_url + "/chat/completions", json={"messages": messages}) as answer:
                messages += [(await answer.json())["choices"][0]["message"], {"role": "user", "content": "So?"}]
            async with http.post(base_url + "/chat/completions", json={"messages": messages}) as answer:
                told = (await answer.json())["error"]
        assert told["code"] == "context_length_exceeded"
        assert "prompt is too long: the placeholder" in told["message"] and NO_ROOM in told["message"]

    sample, _ = meet(agent, ["It <|video_pad|> is.", "never said"])
    assert (sample.status, sample.metadata["session"]["num_turns"]) == (Sample.Status.TRUNCATED, 1)
    assert np.all(sample.loss_mask)


def uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


HUGE = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">II5B", 20000, 20000, 8, 2, 0, 0, 0))
HUGE += png_chunk(b"IDAT", zlib.compress(b""))
CUT = base64.b64decode(png(Image.new("RGB", (640, 640))))[:200]
THIN = base64.b64decode(png(Image.new("RGB", (1, 500))))
# (what `image_url` of OpenAI's chat holds, or a path and a part, words of the error)
UNUSABLE: list[tuple[Any, str]] = [
    ("https://x/y.png", "the image https://x/y.png: nothing is fetched here"),
    ("y.png", "nothing is fetched here"),
    ("data:image/png;base64,A", "a data: URI that cannot be read"),
    ("data:image/png;base64,\ud800", "surrogates"),
    (uri(b"GIF8"), "not an image file of a known format"),
    (uri(HUGE), "Image size (400000000 pixels) exceeds limit"),
    (uri(CUT), "the image cannot be decoded"),
    (("/responses", {"type": "input_image", "image_url": uri(THIN)}), "one side of the image is over 200 times"),
    (("/responses", {"type": "input_image", "file_id": "file-7"}), "file-7"),
    (("/messages", {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}), "the image http://x/y.png"),
    (("/messages", {"type": "image", "source": {"type": "file", "file_id": "file-7"}}), "file-7"),
]


def test_images_of_agents_that_cannot_be_used(meet: Any) -> None:
    """Each is an error of the request, by name; the session continues."""

    async def agent(base_url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for case, words in UNUSABLE:
                chat = "/chat/completions", {"type": "image_url", "image_url": {"url": case}}
                path, part = chat if isinstance(case, str) else case
                messages = [{"role": "user", "content": [part]}]
                body = {"input": messages} if path == "/responses" else {"messages": messages}
                async with http.post(base_url + path, json=body) as answer:
                    told = await answer.json()
                    assert answer.status == 400 and words in told["error"]["message"], (path, told)
            async with http.post(base_url + "/chat/completions", data=b" " * (LONGEST_BODY + 1)) as answer:
                assert answer.status == 413 and "the body has over" in await answer.text()
            body = {"messages": [{"role": "user", "content": "Hm?"}]}
            async with http.post(base_url + "/chat/completions", json=body) as answer:
                assert answer.status == 200

    sample, _ = meet(agent, ["Yes."])
    assert sample.metadata["session"]["num_turns"] == 1
    assert (sample.image_spans, sample.multimodal_inputs) == ([], None), "those of the row are not the agent's"
