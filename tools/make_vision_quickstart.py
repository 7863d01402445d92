"""Write the vision quickstart: a tiny untrained Qwen3-VL, and pictures whose shapes it learns to count.

A picture is a square of 2 x 2 cells; 0 to 4 of them hold a disc or a square of random size, place and colour. The
answer is their number. A random tower learns this in seconds on a CPU, so supervised training can stop half-way and
reinforcement learning has something left to gain. Nothing is downloaded.

    python tools/make_vision_quickstart.py --out DIR [--seed N]

writes DIR/model (a Hugging Face folder) and DIR/{sft,train,eval}.parquet with the columns of geometry3k: `images`,
`problem`, `answer`.
"""

import argparse
import io
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerFast

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS)
PATCH, SIDE = 16, 64  # pixels; a picture has 4 x 4 patches, which are 4 tokens
NUM_TRAIN, NUM_EVAL = 1024, 128
PROBLEM = "<image>Count the shapes."
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def draw(count: int, generator: random.Random) -> "Image":
    """Draw a picture of `count` dark shapes on a light ground."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (SIDE, SIDE), tuple(generator.randint(200, 255) for _ in range(3)))
    pen = ImageDraw.Draw(picture)
    for cell in generator.sample(range(4), count):
        size = generator.randint(SIDE // 9, SIDE // 5)
        x, y = (place * SIDE // 2 + SIDE // 4 + generator.randint(-2, 2) for place in (cell % 2, cell // 2))
        shape = generator.choice((pen.ellipse, pen.rectangle))
        shape((x - size, y - size, x + size, y + size), fill=tuple(generator.randint(0, 130) for _ in range(3)))
    return picture


def rows(number: int, generator: random.Random) -> list[dict[str, Any]]:
    """Return rows with as many pictures of each count."""
    made = []
    for position in range(number):
        content, count = io.BytesIO(), position % 5
        draw(count, generator).save(content, "PNG")
        image = {"bytes": content.getvalue(), "path": None}
        made.append({"images": [image], "problem": PROBLEM, "answer": str(count)})
    generator.shuffle(made)
    return made


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer of bytes and special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **tokens)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model(folder: Path, seed: int) -> int:
    """Write an untrained fp32 Qwen3-VL of two layers, hidden 128, with a tower of 2 x 64; return its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = build_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(_IDS, VISION_TOKENS, strict=True)}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
    }
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": PATCH}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0, 1]}
    tied = {"tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3_vl", text_config=text | tied, vision_config=vision, **tied, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    numbers = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"}
    numbers |= {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    numbers |= {"size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 64 * (2 * PATCH) ** 2}}
    numbers |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(numbers, indent=2))
    return sum(parameter.numel() for parameter in model.parameters())


_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")


def write_quickstart(out: Path, seed: int) -> dict[str, int]:
    """Write model and data under `out`; returns how many parameters and rows there are."""
    import pyarrow
    import pyarrow.parquet

    generator = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    counts = {"parameters": write_model(out / "model", seed)}
    for name, number in (("sft", NUM_TRAIN), ("train", NUM_TRAIN), ("eval", NUM_EVAL)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(number, generator)), out / f"{name}.parquet")
        counts[name] = number
    return counts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write a tiny untrained model that sees, and shapes to count.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the pictures")
    args = parser.parse_args()
    counts = write_quickstart(args.out, args.seed)
    print(f"{args.out}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
