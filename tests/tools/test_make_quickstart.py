"""The quickstart folder is what the framework reads: a loadable model, disjoint splits, a short template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.forked_program import ForkedProgram
from tools.make_quickstart import NUM_EVAL, split_sums

ROOT = Path(__file__).resolve().parents[2]


def make(out: Path, seed: int) -> Path:
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), "--out", str(out), "--seed", str(seed)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return out


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("quickstart") / "seed0", 0)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_split_covers_every_pair_once_and_depends_on_the_seed() -> None:
    train, held_out = split_sums(3)
    assert len(held_out) == NUM_EVAL
    assert sorted(train + held_out) == [(a, b) for a in range(10, 100) for b in range(10, 100)]
    assert split_sums(3) == (train, held_out)
    assert split_sums(4)[1] != held_out


def test_evaluation_prompts_are_never_trained_on(quickstart: Path) -> None:
    held_out = {row["prompt"] for row in rows(quickstart / "eval.jsonl")}
    train = {row["prompt"] for row in rows(quickstart / "train.jsonl")}
    sft = {row["messages"][0]["content"] for row in rows(quickstart / "sft.jsonl")}
    assert len(held_out) == NUM_EVAL
    assert not held_out & train
    assert not held_out & sft


def test_answers_are_right(quickstart: Path) -> None:
    for row in rows(quickstart / "train.jsonl") + rows(quickstart / "eval.jsonl"):
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["label"]) == int(a) + int(b)


def test_template_is_short_and_the_answer_extends_the_prompt(quickstart: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    messages = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert prompt == "<|user|>12+34=<|assistant|>"
    assert whole == prompt + "46<|end|>"
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    assert len(ids) == 11
    assert ids[:8] == tokenizer(prompt, add_special_tokens=False).input_ids
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[8:], skip_special_tokens=True) == "46"


def test_model_loads_knows_its_end_token_and_starts_near_a_uniform_guess(quickstart: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(quickstart / "model", dtype=torch.float32)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 1.0e6
    assert model.config.vocab_size == 64
    assert model.config.eos_token_id == 1
    assert GenerationConfig.from_pretrained(quickstart / "model").eos_token_id == 1
    with torch.no_grad():
        probabilities = model(torch.arange(6, 16)[None]).logits.softmax(-1)
    assert probabilities.max() < 0.5


def test_the_seed_alone_decides_every_byte(forkserver: None, quickstart: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    write = "from pathlib import Path; from tools.make_quickstart import write_quickstart as write; "
    code = (
        write + f"write(Path({str(other)!r}), 1); write(Path({str(again)!r}), 0)"
    )  # one process: it imports for seconds
    done = ForkedProgram(["-c", code], tmp_path).wait(300)
    assert done.returncode == 0, done.stderr
    for name in ("model/model.safetensors", "model/tokenizer.json", "train.jsonl", "eval.jsonl"):
        assert (again / name).read_bytes() == (quickstart / name).read_bytes(), name
    for name in ("model/model.safetensors", "train.jsonl", "eval.jsonl"):
        assert (other / name).read_bytes() != (quickstart / name).read_bytes(), name
