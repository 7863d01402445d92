"""Real engines with a reward model and with a teacher in them: their numbers are transformers'."""

import asyncio
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionrl.config.config import Config
from fusionrl.data.sample import Sample
from fusionrl.engines.engine import EngineActor
from fusionrl.models.engine_config import REWARD_MODELS
from fusionrl.rewards.dispatch import RewardError, async_rm
from fusionrl.rollout.teacher import score_samples
from tests.engines.real_engine import KEY, log_probs, real_engine
from tests.tiny_model import make_classifier, make_tiny_qwen3

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
POSITIONS = 2048  # of the tiny models
PAD = 256


@pytest.fixture(scope="module")
def args(forked_engines: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("scorers")
    rm, teacher = make_classifier(tiny_model, folder / "rm", 3), make_tiny_qwen3(folder / "teacher", 4)
    flags = {"rm_model": str(rm), "rm_type": "reward_model", "opd_teacher_load": str(teacher), "use_opd": True}
    made: Any = Config.from_flat({"hf_checkpoint": str(tiny_model), **flags}).to_args(api_key=KEY, vocab_size=512)
    models = (("reward-model", rm), ("teacher", teacher))  # long samples are read in pieces
    engines = [real_engine(model, folder, role, chunked_prefill_size=96) for role, model in models]
    try:
        with ThreadPoolExecutor() as pool:
            urls = list(pool.map(EngineActor.start, engines))
        made.rm_urls, made.teacher_urls = urls[:1], urls[1:]
        yield made
        assert (folder / "reward-model-0.log").is_file() and (folder / "teacher-0.log").is_file()
    finally:
        for one in engines:
            one.shutdown()


def samples_of(lengths: list[tuple[int, int]]) -> list[Sample]:
    """Random tokens, (prompt, response) of each; the middle third of a response is a tool's."""
    rng = np.random.default_rng(0)
    samples = []
    for index, (prompt, response) in enumerate(lengths):
        sample = Sample(index=index, group_index=index // 2, tokens=rng.integers(0, 512, prompt))
        for part, trainable in zip(np.array_split(rng.integers(0, 512, response), 3), (True, False, True), strict=True):
            sample.append_response_tokens(tokens=part, log_probs=np.zeros(len(part)), trainable=trainable)
        samples.append(sample)
    return samples


def rewards(args: Any, samples: list[Sample], **changes: Any) -> list[Any]:
    async def ask() -> list[Any]:
        own = type(args)(**{**vars(args), **changes})
        return await asyncio.gather(*(async_rm(own, sample) for sample in samples))

    return asyncio.run(ask())


def reference(args: Any, token_ids: list[np.ndarray]) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(args.rm_model, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(torch.as_tensor(np.asarray(ids, np.int64))[None]).logits[0, 0]) for ids in token_ids]


def test_rewards_are_those_of_transformers(args: Any) -> None:
    lengths = [(5, 7), (5, 1), (40, 200), (1, 3), (POSITIONS - 300, 300)]
    samples = samples_of(lengths)
    padded = samples_of([(9, 6)])[0]
    padded.tokens = np.concatenate([np.asarray(padded.tokens)[:-2], [PAD, PAD]])  # the end that transformers skips
    samples.append(padded)
    expected = reference(args, [np.asarray(sample.tokens) for sample in samples])
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(rewards(args, samples), expected, atol=1e-4)
    for sample in samples:
        sample.response, sample.label = "yes", "yes"
    summed = rewards(args, samples, rm_type="reward_model:0.5+exact:0.25")
    np.testing.assert_allclose(summed, 0.5 * np.array(expected) + 0.25, atol=1e-4)
    parts = [sample.metadata["rewards"] for sample in samples]
    np.testing.assert_allclose([part["reward_model"] for part in parts], expected, atol=1e-4)


def test_the_conversation_is_written_by_the_reward_model_s_template(args: Any) -> None:
    text = Sample(prompt="1+1=", tokens=[9, 9], response="2", response_length=1)
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    several = Sample(prompt="rendered by the policy's", messages=turns, tokens=[9, 9], response="2", response_length=1)
    written = [
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",
    ]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.rm_model)
    expected = reference(args, [np.array(tokenizer.encode(one)) for one in written])
    np.testing.assert_allclose(rewards(args, [text, several], rm_input="chat"), expected, atol=1e-4)


def test_what_would_end_the_server_is_not_sent(args: Any) -> None:
    """An id that the model has not, and no tokens at all, end an SGLang server."""
    for tokens, message in (([1, 512], "token 512 is none of the 512 of --rm-model"), ([], "it has no tokens")):
        with pytest.raises(RewardError, match=f"--rm-type reward_model: {message}.* at sample 7"):
            rewards(args, [Sample(index=7, tokens=tokens)])
    with pytest.raises(RewardError, match="answered 400.* at sample 8"):
        rewards(args, [Sample(index=8, tokens=np.ones(POSITIONS + 9, np.int64))])
    assert len(rewards(args, [Sample(tokens=[1, 2])])) == 1


def test_the_teacher_s_log_probs_are_those_of_transformers(args: Any) -> None:
    from transformers import AutoModelForCausalLM

    samples = samples_of([(5, 7), (5, 30), (40, 200), (1, 3), (POSITIONS - 300, 300), (0, 4), (6, 0)])
    twin = Sample(index=9, group_index=9, tokens=samples[1].tokens, response_length=30)
    removed, known = samples_of([(5, 7), (5, 7)])
    removed.remove_sample, known.teacher_log_probs = True, np.full(7, -3.0, np.float32)
    asyncio.run(score_samples(args, [*samples, twin, removed, known]))
    model = AutoModelForCausalLM.from_pretrained(args.opd_teacher_load, dtype=torch.float32).eval()
    for sample in [*samples[:-1], twin]:
        expected = np.concatenate([[0.0], log_probs(model, sample.tokens, 1)])[sample.prompt_length :]
        assert isinstance(sample.teacher_log_probs, np.ndarray) and sample.teacher_log_probs.dtype == np.float32
        np.testing.assert_allclose(sample.teacher_log_probs, expected, atol=1e-4)
    assert samples[-1].teacher_log_probs is None and removed.teacher_log_probs is None  # they train nothing
    assert known.teacher_log_probs.tolist() == [-3.0] * 7  # a function of the user's has said it
    long = samples_of([(POSITIONS, 9)])[0]
    with pytest.raises(RuntimeError, match=r"--opd-teacher-load: the teacher at sample 0: .* answered 400"):
        asyncio.run(score_samples(args, [long]))


def test_sglang_serves_these_as_classifiers() -> None:
    from fusionrl.base import cpu_wing

    cpu_wing.install_stand_ins()
    from sglang.srt.configs.model_config import is_generation_model

    assert not any(is_generation_model([name]) for name in REWARD_MODELS)
