"""Several turns over one real SGLang server: its log-probs are those of one forward pass over the whole sample."""

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
from fusionrl.rollout.agent import append_text, begin, end_of_turn
from fusionrl.rollout.sglang_rollout import generate_turn, sampling_params
from tests.rollout.engine import KEY


@pytest.mark.engine
@pytest.mark.xdist_group("served")
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_turns_have_the_model_s_log_probs(tiny_model: Path, served: EngineActor) -> None:
    from transformers import AutoModelForCausalLM

    args: Any = Config.from_flat(
        {"hf_checkpoint": str(tiny_model), "rollout_max_response_len": 12, "rollout_max_context_len": 500}
    ).to_args()

    async def turns() -> tuple[Sample, list[int | None], list[str]]:
        sample = Sample(prompt="Where is it? ")
        begin(args, sample)
        ends, finishes = [], []
        async with GenerateClient(served.url, KEY, 120.0, 4, vocab_size=512) as args.generate_client:
            for number in range(4):
                # Every second turn is ended by a token, the others by their length.
                params = sampling_params(args) | {"ignore_eos": number % 2 == 0}
                params |= {"stop_token_ids": list(range(40, 512))} if number % 2 else {}
                answer = await generate_turn(args, sample, params)
                assert answer is not None
                ends.append(end_of_turn(answer))
                finishes.append(answer.finish_reason)
                assert append_text(args, sample, params, f"\n<result {number}>\n")
        return sample, ends, finishes

    sample, ends, finishes = asyncio.run(turns())
    assert finishes[0::2] == ["length"] * 2 and finishes[1::2] == ["stop"] * 2
    assert ends[0::2] == [None, None]
    assert all(isinstance(end, int) and end >= 40 for end in ends[1::2])
    mask = np.asarray(sample.loss_mask, bool)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.asarray(sample.tokens, np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, sample.prompt_length - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, ids[0, sample.prompt_length :, None])[:, 0].numpy()
    assert mask.sum() >= 26
    np.testing.assert_allclose(np.asarray(sample.rollout_log_probs)[mask], expected[mask], atol=1e-4)
    assert not np.asarray(sample.rollout_log_probs)[~mask].any()
