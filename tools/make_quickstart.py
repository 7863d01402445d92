"""Write the quickstart: a tiny untrained Qwen3 and an addition task, made from nothing but a seed.

The model (0.8 million parameters, a character-level tokenizer) learns `12+34=` -> `46` on a CPU in under a
minute, so supervised training can stop half-way and reinforcement learning has something left to gain.
Nothing is downloaded.

    python tools/make_quickstart.py --out DIR [--seed N]

writes DIR/model (a Hugging Face folder) and DIR/{sft,train,eval}.jsonl. The 8,100 sums of two two-digit
numbers are split once by the seed: `eval` holds 512 of them, `sft` and `train` hold the others, so an
accuracy on `eval` is always one on sums that no training has shown.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAD, END, USER, ASSISTANT, SYSTEM, UNKNOWN = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|unk|>",
)
# Exactly 64 tokens with the special ones: a power of two divides evenly over any tensor-parallel size.
CHARACTERS = "0123456789+-*/=()<>., :;?!'\"\n#_%abcdefghijklmnopqrstuvwxyz"
NUM_EVAL = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def split_sums(seed: int, num_eval: int = NUM_EVAL) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of two-digit numbers, shuffled by `seed` and split into (training pairs, held-out pairs)."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs[num_eval:], pairs[:num_eval]


def build_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` with one token a character and one a special token; 64 in all."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: Any, seed: int) -> Any:
    """An untrained fp32 `Qwen3ForCausalLM` of 4 layers, hidden 128, whose weights depend on `seed` alone."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        # transformers starts the padding token's embedding at zero, where the gradient of an RMS norm is a
        # thousand times a usual one. A policy that samples that token once would spend a whole clipped step
        # on it.
        with torch.no_grad():
            model.model.embed_tokens.weight[tokenizer.pad_token_id].normal_(std=config.initializer_range)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model.float()


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_quickstart(out: Path, seed: int) -> dict[str, int]:
    """Write model and data under `out`; returns how many parameters and rows there are."""
    train, held_out = split_sums(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

    def rl_row(a: int, b: int) -> dict[str, str]:
        return {"prompt": f"{a}+{b}=", "label": str(a + b)}

    def sft_row(a: int, b: int) -> dict[str, Any]:
        turns = (("user", f"{a}+{b}="), ("assistant", str(a + b)))
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    write_jsonl(out / "sft.jsonl", (sft_row(a, b) for a, b in train))
    write_jsonl(out / "train.jsonl", (rl_row(a, b) for a, b in train))
    write_jsonl(out / "eval.jsonl", (rl_row(a, b) for a, b in held_out))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "sft": len(train),
        "train": len(train),
        "eval": len(held_out),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write a tiny untrained model and an addition task.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the split")
    args = parser.parse_args()
    counts = write_quickstart(args.out, args.seed)
    print(f"{args.out}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
