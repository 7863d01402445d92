"""Samples with images of three kinds in one run: one turn, the zoom tool, and agents of the client packages."""

import base64
import io
import json
from typing import Any

from fusionrl.rollout import agent, sessions, zoom
from fusionrl.rollout.sglang_rollout import generate as one_turn

NUM_TURNS = {"one turn": 1, "zoom": 2, "chat": 2, "anthropic": 2}  # of a sample of each kind that nothing cuts
QUARTERS = ([0, 0, 500, 500], [500, 0, 1000, 500], [0, 500, 500, 1000], [500, 500, 1000, 1000])


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A sample of the kind that its number has."""
    kind = sample.index % 4
    if kind == 1:  # an untrained model hardly ends a turn; one that is cut calls no tool
        sampling_params = {**sampling_params, "stop_token_ids": list(range(200))}
    make = (one_turn, agent.generate, sessions.generate, sessions.generate)[kind]
    return await make(args, sample, sampling_params)


def tools(args: Any, sample: Any) -> list[Any]:
    """The zoom; its calls are found by a parser of the test's, whatever an untrained model says."""
    agent.parser_name("qwen25", args.hf_checkpoint)  # SGLang can be imported after that
    from sglang.srt.function_call.base_format_detector import BaseFormatDetector
    from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    class AnyText(BaseFormatDetector):
        """Reads a call of the zoom into each text, with a quarter by its length."""

        def has_tool_call(self, text: str) -> bool:
            return True

        def detect_and_parse(self, text: str, tools: Any) -> StreamingParseResult:
            box = json.dumps({"bbox_2d": QUARTERS[len(text) % 4]})
            return StreamingParseResult(calls=[ToolCallItem(tool_index=0, name="image_zoom_in_tool", parameters=box)])

        def structure_info(self) -> Any:
            raise NotImplementedError

    FunctionCallParser.ToolCallParserEnum["any_text"] = AnyText
    return list(zoom.tools(args, sample))


async def shows(args: Any, sample: Any, base_url: str, api_key: str) -> float:
    """Ask about the row's image, and then about another, by either protocol."""
    from PIL import Image

    data = []
    for image in (sample.multimodal_inputs["images"][0], Image.new("RGB", (96, 32), (sample.index % 256, 90, 40))):
        file = io.BytesIO()
        image.save(file, "PNG")
        data.append(base64.b64encode(file.getvalue()).decode())
    messages: list[Any] = []
    if sample.index % 4 == 3:
        from anthropic import AsyncAnthropic

        async with AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
            for one in data:
                source = {"type": "base64", "media_type": "image/png", "data": one}
                messages.append({"role": "user", "content": [{"type": "image", "source": source}]})
                answer: Any = await client.messages.create(model="any", max_tokens=8, messages=messages)
                messages.append({"role": "assistant", "content": answer.content})
        return float(len(answer.content[0].text))
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for one in data:
            part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}}
            messages.append({"role": "user", "content": [part, {"type": "text", "text": "And this?"}]})
            said = await client.chat.completions.create(model="any", messages=messages)
            messages.append(said.choices[0].message.model_dump(exclude_none=True))
    return float(len(messages[-1]["content"]))


def length(args: Any, sample: Any) -> float:
    """A reward that differs among samples."""
    return float(len(sample.response))
