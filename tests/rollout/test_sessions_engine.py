"""Agents with the client packages over a real SGLang server: log-probs are those of one pass over the whole sample."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionrl.config.config import Config
from fusionrl.data.sample import Sample
from fusionrl.engines.client import GenerateClient
from fusionrl.engines.engine import EngineActor
from fusionrl.rollout.sessions import open_session
from fusionrl.rollout.sglang_rollout import sampling_params
from tests.rollout.engine import KEY

NEEDED = ("sglang", "openai", "anthropic")


async def by_openai(base_url: str, api_key: str) -> None:
    """Three turns of one conversation; the second is streamed, the third belongs to a history of its own."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "system", "content": "Go on."}, {"role": "user", "content": "Where is it?"}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="any", messages=messages)
        assert answer.usage.completion_tokens == 12 and answer.choices[0].finish_reason == "length"
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "And then?"}]
        stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "So?"}]
        await client.chat.completions.create(model="any", messages=messages)
        await client.chat.completions.create(model="any", messages=messages[:2])


async def by_anthropic(base_url: str, api_key: str) -> None:
    """The same by the other protocol."""
    from anthropic import AsyncAnthropic

    messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
    asked: Any = {"model": "any", "max_tokens": 100, "system": "Go on."}
    async with AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.messages.create(**asked, messages=messages)
        assert answer.usage.output_tokens == 12 and answer.stop_reason == "max_tokens"
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And then?"}]
        async with client.messages.stream(**asked, messages=messages) as stream:
            answer = await stream.get_final_message()
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "So?"}]
        await client.messages.create(**asked, messages=messages)
        await client.messages.create(**asked, messages=messages[:1])


@pytest.mark.engine
@pytest.mark.xdist_group("served")
@pytest.mark.slow
@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in NEEDED), reason="a package is missing")
def test_sessions_have_the_model_s_log_probs(tiny_model: Path, served: EngineActor) -> None:
    from transformers import AutoModelForCausalLM

    flags = {"hf_checkpoint": str(tiny_model), "rollout_max_response_len": 12, "rollout_max_context_len": 900}
    args: Any = Config.from_flat(flags | {"rollout_ignore_eos": True}).to_args()

    async def sessions() -> list[list[Sample]]:
        made = []
        async with GenerateClient(served.url, KEY, 120.0, 4, vocab_size=512) as args.generate_client:
            for agent in (by_openai, by_anthropic):
                async with open_session(args, Sample(prompt="?"), sampling_params(args)) as session:
                    await agent(session.base_url, session.api_key)
                made.append(session.samples(1.0))
        return made

    found = asyncio.run(sessions())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for samples in found:
        assert [sample.metadata["session"]["num_turns"] for sample in samples] == [3, 1]
        for sample in samples:
            mask = np.asarray(sample.loss_mask, bool)
            assert mask.sum() == 12 * sample.metadata["session"]["num_turns"]
            ids = torch.from_numpy(np.asarray(sample.tokens, np.int64))[None]
            with torch.no_grad():
                logits = model(ids).logits[0, sample.prompt_length - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, ids[0, sample.prompt_length :, None])[:, 0].numpy()
            np.testing.assert_allclose(np.asarray(sample.rollout_log_probs)[mask], expected[mask], atol=1e-4)
