"""Turns over a real SGLang server: the log-probs of a sample are those of one forward pass over all of it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionrl.config.config import Config
from fusionrl.data.sample import Sample
from fusionrl.engines.client import GenerateClient
from fusionrl.engines.engine import EngineActor
from fusionrl.rollout.agent import append_text, begin, end_of_turn
from fusionrl.rollout.sessions import open_session
from fusionrl.rollout.sglang_rollout import generate_turn, sampling_params
from tests.rollout.engine import KEY, check_log_probs, needs

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("served"), pytest.mark.slow, needs("sglang", "openai")]


async def converse(base_url: str, api_key: str) -> None:
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


def test_sessions_have_the_model_s_log_probs(tiny_model: Path, served: EngineActor) -> None:
    flags = {"hf_checkpoint": str(tiny_model), "rollout_max_response_len": 12, "rollout_max_context_len": 900}
    args: Any = Config.from_flat(flags | {"rollout_ignore_eos": True}).to_args()

    async def run() -> Any:
        async with (
            GenerateClient(served.url, KEY, 120.0, 4, vocab_size=512) as args.generate_client,
            open_session(args, Sample(prompt="?"), sampling_params(args)) as session,
        ):
            await converse(session.base_url, session.api_key)
        return session.samples(1.0)

    samples = asyncio.run(run())
    assert [sample.metadata["session"]["num_turns"] for sample in samples] == [3, 1]
    for sample in samples:
        assert np.sum(sample.loss_mask) == 12 * sample.metadata["session"]["num_turns"]
        check_log_probs(tiny_model, sample)


def test_turns_have_the_model_s_log_probs(tiny_model: Path, served: EngineActor) -> None:
    flags = {"hf_checkpoint": str(tiny_model), "rollout_max_response_len": 12, "rollout_max_context_len": 500}
    args: Any = Config.from_flat(flags).to_args()

    async def turns() -> tuple[Sample, list[tuple[str, int | None]]]:
        sample = Sample(prompt="Where is it? ")
        begin(args, sample)
        ends = []
        async with GenerateClient(served.url, KEY, 120.0, 4, vocab_size=512) as args.generate_client:
            for number in range(4):
                # Every second turn is ended by a token, the others by their length.
                params = sampling_params(args) | {"ignore_eos": number % 2 == 0}
                params |= {"stop_token_ids": list(range(40, 512))} if number % 2 else {}
                answer = await generate_turn(args, sample, params)
                assert answer is not None
                ends.append((answer.finish_reason, end_of_turn(answer)))
                assert append_text(args, sample, params, f"\n<result {number}>\n")
        return sample, ends

    sample, ends = asyncio.run(turns())
    assert ends[0::2] == [("length", None)] * 2
    assert all(finish == "stop" and isinstance(end, int) and end >= 40 for finish, end in ends[1::2])
    assert np.sum(sample.loss_mask) >= 26  # type: ignore[arg-type]
    check_log_probs(tiny_model, sample)
