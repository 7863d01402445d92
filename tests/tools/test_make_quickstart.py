"""The quickstart folder is what the framework reads: a loadable model, disjoint splits, a short template."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.forked_program import ForkedProgram
from tools.make_quickstart import NUM_EVAL, write_quickstart


@pytest.fixture(scope="module")
def folders(forkserver: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quickstarts of seeds 0 and 1 by another process, and again of 0 by this one."""
    home = tmp_path_factory.mktemp("quickstart")
    make = "import sys; from tools.make_quickstart import main\n"
    for name, seed in (("seed0", 0), ("other", 1)):
        make += f"sys.argv = ['', '--out', {str(home / name)!r}, '--seed', '{seed}']; main()\n"
    done = ForkedProgram(["-c", make], home).wait(300)
    assert done.returncode == 0, done.stderr
    write_quickstart(home / "again", 0)
    return home


@pytest.fixture(scope="module")
def quickstart(folders: Path) -> Path:
    return folders / "seed0"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_evaluation_prompts_are_never_trained_on_and_answers_are_right(quickstart: Path) -> None:
    train, held_out = rows(quickstart / "train.jsonl"), rows(quickstart / "eval.jsonl")
    sft = {row["messages"][0]["content"] for row in rows(quickstart / "sft.jsonl")}
    prompts = {row["prompt"] for row in held_out}
    assert len(prompts) == NUM_EVAL and not prompts & (sft | {row["prompt"] for row in train})
    for row in train + held_out:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["label"]) == int(a) + int(b)


def test_template_is_short_and_the_answer_extends_the_prompt(quickstart: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    messages = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert (prompt, whole) == ("<|user|>12+34=<|assistant|>", prompt + "46<|end|>")
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    assert len(ids) == 11 and ids[-1] == tokenizer.eos_token_id
    assert ids[:8] == tokenizer(prompt, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids[8:], skip_special_tokens=True) == "46"


def test_model_loads_knows_its_end_token_and_starts_near_a_uniform_guess(quickstart: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(quickstart / "model", dtype=torch.float32)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 1.0e6
    assert (model.config.vocab_size, model.config.eos_token_id) == (64, 1)
    assert GenerationConfig.from_pretrained(quickstart / "model").eos_token_id == 1
    with torch.no_grad():
        assert model(torch.arange(6, 16)[None]).logits.softmax(-1).max() < 0.5
