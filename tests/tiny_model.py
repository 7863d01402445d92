"""A Qwen3 checkpoint of a few ten thousand random parameters, for tests that need a real model on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_byte_tokenizer(max_length: int = 2048, more: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Tokens 0-255 are the bytes, 256-258 the special tokens, then `more`; no merges, so nothing is looked up."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *more])
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **tokens)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_qwen3(path: str | Path, seed: int = 0, *, num_layers: int = 2, vocab_size: int = 512) -> Path:
    """Write a float32 Qwen3 (hidden 64, 4 heads, 2 KV heads) with tokenizer and chat template to `path`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_byte_tokenizer()
    tokenizer.save_pretrained(path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": num_layers, "vocab_size": vocab_size}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048}
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(**sizes, **tokens, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)  # away from the uniform distribution, so that a wrong weight shows
    model.save_pretrained(path)
    return Path(path)


def make_classifier(policy: str | Path, path: str | Path, seed: int = 0, num_labels: int = 1) -> Path:
    """Write a float32 sequence classifier of the shape of `policy`, random, with its tokenizer to `path`."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(policy, num_labels=num_labels)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)  # away from scores that are all the same
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(policy).save_pretrained(path)
    return Path(path)


def make_fp8(
    model: str | Path, path: str | Path, block: tuple[int, int], left_out: tuple[str, ...] = (), **quantization: Any
) -> dict[str, torch.Tensor]:
    """Write `model` with its projections in block-wise fp8 to `path`, but for modules named in `left_out`.

    `quantization` are further fields of its quantization_config. Returns its weights as they are then, in fp32.
    """
    from safetensors.torch import load_file, save_file

    from fusionrl.models.convert import SCALE, dequantize, quantize

    shutil.copytree(model, path)
    stored = load_file(Path(path) / "model.safetensors")
    whole = dict(stored)
    for name, tensor in whole.items():
        if name.endswith("_proj.weight") and not any(module in name for module in left_out):
            stored[name], stored[name + SCALE] = quantize(tensor, block)
            whole[name] = dequantize(stored[name], stored[name + SCALE], block)
    save_file(stored, Path(path) / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((Path(path) / "config.json").read_text())
    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    config["quantization_config"] = fields | {"modules_to_not_convert": ["lm_head", *left_out]} | quantization
    (Path(path) / "config.json").write_text(json.dumps(config))
    return whole


def make_mxfp4(folder: str | Path, seed: int = 0) -> Path:
    """Give the gpt-oss in `folder` other experts, random ones in MXFP4 (sizes must be multiples of 32)."""
    import torch
    from safetensors.torch import load_file, save_file

    random = torch.Generator().manual_seed(seed)
    file, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
    stored = load_file(file)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        sizes = experts, rows, columns // 32
        stored[f"{name}_blocks"] = torch.randint(256, (*sizes, 16), dtype=torch.uint8, generator=random)
        stored[f"{name}_scales"] = torch.randint(122, 125, sizes, dtype=torch.uint8, generator=random)
    save_file(stored, file, metadata={"format": "pt"})
    fields = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": fields}))
    return Path(folder)
