"""A real SGLang engine on a CPU that speculates with n-grams: its log-probs are the model's, drafts or not."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionrl.data.sample_fields import SpecInfo
from fusionrl.engines.engine import EngineActor
from fusionrl.plan.placement import CPU_DRAFTERS
from tests.engines.real_engine import log_probs, real_engine
from tests.tiny_model import make_tiny_qwen3

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(
        shutil.which("g++") is None or shutil.which("ninja") is None, reason="SGLang compiles its table of n-grams"
    ),
]
PROMPTS = [[5, 9, 33, 77, 100, 20] * 3, [7, 8, 9], [1, 2, 3, 4] * 5]
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(forked_engines: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineActor]:
    ngrams = {"speculative_num_draft_tokens": 6, "speculative_ngram_max_bfs_breadth": 2}
    engine = real_engine(model, tmp_path_factory.mktemp("logs"), speculative_algorithm=CPU_DRAFTERS[0], **ngrams)
    try:
        engine.start()
        yield engine
    finally:
        engine.shutdown()


def _generate(engine: EngineActor, temperature: float) -> list[dict[str, Any]]:
    params = {"max_new_tokens": NUM_TOKENS, "temperature": temperature, "ignore_eos": True}
    payload = {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True}
    answers = engine._post("/generate", payload)
    assert isinstance(answers, list)
    return [answer["meta_info"] for answer in answers]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probs_are_the_model_s(engine: EngineActor, model: Path, temperature: float) -> None:
    """By transformers, which knows nothing of drafts; a token that is the likeliest one is so without drafts, too."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    counts = SpecInfo()
    num_likeliest = 0
    for prompt, meta in zip(PROMPTS, _generate(engine, temperature), strict=True):
        counts.add(meta)
        found, tokens, _ = zip(*meta["output_token_logprobs"], strict=True)
        ids = prompt + list(tokens)
        np.testing.assert_allclose(found, log_probs(policy, ids, len(prompt), temperature or 1.0), atol=1e-4)
        with torch.no_grad():
            likeliest = policy(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        num_likeliest += int((likeliest == torch.tensor(tokens)).sum())
    assert counts.completion_token_num == NUM_TOKENS * len(PROMPTS)
    assert counts.spec_draft_token_num == 5 * counts.spec_verify_ct > 0
    if temperature == 0:
        assert num_likeliest == counts.completion_token_num
        assert counts.spec_accept_token_num > 0 and counts.spec_accept_length > 1.2
    if temperature == 1:  # SGLang's own way on a CPU takes the likeliest token even so
        assert num_likeliest < counts.completion_token_num / 2
