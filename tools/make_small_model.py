"""Write a small random model of the family of a large one, from its config.json and tokenizer alone.

    python tools/make_small_model.py --of /path/to/Qwen3-4B --out runs/small [--layers 2]

For a first try of a launch command on a machine without a GPU: the model takes the same flags, tokenizer and chat
template, runs in a second, and knows nothing. The folder `--of` needs no weights.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

# What each size becomes where it is larger: widths first, then experts, then the parts of latent attention.
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8, "n_routed_experts": 8},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map*",
    "added_tokens*",
    "chat_template*",
    "*.model",
)
PADDED = 64  # the vocabulary is a multiple of it


def small_config(config: Mapping[str, object], num_tokens: int, num_layers: int) -> dict[str, object]:
    """Return `config` at a small size. Everything but sizes stays: norms, biases, rotary embeddings, tied embeddings.

    num_tokens  of the tokenizer: ids of the model go from 0 to at least one less
    """
    small = {name: value for name, value in config.items() if name != "quantization_config"}
    for name, most in SIZES.items():
        if isinstance(value := small.get(name), int) and value > most:
            small[name] = most
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(groups, int):  # as many as heads stay as many; fewer stay fewer
        small["num_key_value_heads"] = small["num_attention_heads"] if groups == heads else min(2, groups)
    small["num_hidden_layers"] = num_layers
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(types := small.get(name), list):
            small[name] = types[:num_layers]
    small["vocab_size"] = -(-num_tokens // PADDED) * PADDED
    small["torch_dtype"] = small["dtype"] = "float32"
    return small


def make(source: Path, out: Path, num_layers: int, seed: int = 0) -> int:
    """Write the model and its tokenizer to `out`; returns the number of its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    out.mkdir(parents=True)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(small_config(raw, len(tokenizer), num_layers), indent=1))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32)
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", type=Path, required=True, metavar="MODEL", help="folder of the large model")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    if not (options.of / "config.json").is_file():
        parser.error(f"--of {options.of}: it has no config.json; name a Hugging Face folder")
    if options.out.exists():
        parser.error(f"--out {options.out} is there already; name a new folder")
    count = make(options.of, options.out, options.layers)
    print(f"{options.out}: {count / 1e6:.1f} million random parameters; --hf-checkpoint {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
