"""Write the vision quickstart: a tiny untrained Qwen3-VL, and pictures whose shapes it learns to count.

A picture is a square of 2 x 2 cells; 0 to 4 of them hold a disc or a square of random size, place and colour. The
answer is their number. A random tower learns this in seconds on a CPU, so supervised training can stop half-way and
reinforcement learning has something left to gain. Nothing is downloaded.

    python tools/make_vision_quickstart.py --out DIR [--seed N] [--task zoom]

writes DIR/model (a Hugging Face folder) and DIR/{sft,train,eval}.parquet with the columns of geometry3k: `images`,
`problem`, `answer`.

The task `zoom` is DeepEyes' in small: a picture of 512 x 512, which the model sees as 64 x 64 (--image-max-pixels
4096), has a pattern in each quarter, and asks for the one of the light quarter. Its lines of 4 pixels are grey for the
model until it looks at the quarter alone with `image_zoom_in_tool`. The tokenizer has tokens for the parts of such a
call. `sft` has conversations, `messages`, of which half look at any quarter, and tell its pattern: they teach the call
and to read patterns; where to look is left to reinforcement learning. One who looks anywhere is right in 44 %.
"""

import argparse
import functools
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerFast

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS)
PATCH, SIDE = 16, 64  # pixels; a picture has 4 x 4 patches, which are 4 tokens
NUM_TRAIN, NUM_EVAL = 1024, 128
PROBLEM = "<image>Count the shapes."
CHAT_TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|>system\n{{ t['function']['name'] }}<|im_end|>\n{% endfor %}"
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


def png(picture: "Image") -> dict[str, Any]:
    """Return a picture as the columns of published data hold it."""
    content = io.BytesIO()
    picture.save(content, "PNG", compress_level=1)
    return {"bytes": content.getvalue(), "path": None}


def rows(number: int, generator: random.Random) -> list[dict[str, Any]]:
    """Return rows with as many pictures of each count."""
    made = []
    for position in range(number):
        count = position % 5
        made.append({"images": [png(draw(count, generator))], "problem": PROBLEM, "answer": str(count)})
    generator.shuffle(made)
    return made


# ------------------------------------------------------------------------------------------------ the task `zoom`
BOXES = ("[0,0,500,500]", "[500,0,1000,500]", "[0,500,500,1000]", "[500,500,1000,1000]")
CALL = ('<tool_call>\n{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": ', "}}\n</tool_call>")
TOOL = json.dumps([{"type": "function", "function": {"name": "image_zoom_in_tool"}}])
ZOOM_PROBLEM = "<image>Which pattern?"


@functools.cache
def patterns() -> "list[np.ndarray]":
    """Return four patterns [256, 256] from -1 to 1: rows, columns, squares and none."""
    row, column = np.indices((4 * SIDE, 4 * SIDE)) // 4 % 2 * 2 - 1
    edge = np.clip(np.minimum(np.arange(4 * SIDE), np.arange(4 * SIDE)[::-1]) / 64, 0, 1)  # lines would show there
    return [np.outer(edge, edge) * way for way in (row, column, row * column, np.zeros_like(row))]


def draw_patterns(place: int, numbers: Sequence[int], generator: random.Random) -> "np.ndarray":
    """Return [512, 512] uint8, grey: four quarters with the patterns of these numbers (from 1 on), a light one."""
    grounds = [generator.randint(150, 155) if i == place else generator.randint(100, 115) for i in range(4)]
    cells = [ground + 100 * patterns()[number - 1] for ground, number in zip(grounds, numbers, strict=True)]
    return np.block([cells[:2], cells[2:]]).astype(np.uint8)


def zoom_rows(number: int, generator: random.Random, shows: bool) -> list[dict[str, Any]]:
    """Return rows of the task `zoom`; `shows`: conversations, half of them about any quarter."""
    from PIL import Image

    made = []
    for position in range(number):
        place, numbers = position % 4, [generator.randint(1, 4) for _ in range(4)]
        picture = Image.fromarray(draw_patterns(place, numbers, generator))
        images, half = [picture], 4 * SIDE
        looked = generator.choice((place, generator.randrange(4))) if shows else place
        answer = str(numbers[looked])
        row: dict[str, Any] = {"problem": ZOOM_PROBLEM, "answer": answer, "tools": TOOL}
        if shows:
            left, top = looked % 2 * half, looked // 2 * half
            images.append(picture.crop((left, top, left + half, top + half)))
            shown = f"<image>The part {json.loads(BOXES[looked])} of image 0."
            said = (ZOOM_PROBLEM, CALL[0] + BOXES[looked] + CALL[1], shown, answer)
            roles = ("user", "assistant", "tool", "assistant")
            row["messages"] = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        made.append(row | {"images": [png(image) for image in images]})
    generator.shuffle(made)
    return made


def write_rows(path: Path, made: list[dict[str, Any]]) -> None:
    """Write rows to a parquet file."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), path)


def build_tokenizer(more: Sequence[str] = ()) -> "PreTrainedTokenizerFast":
    """Return a tokenizer of bytes, special tokens and `more`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens(list(more))
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **tokens)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model(folder: Path, seed: int, more: Sequence[str] = ()) -> int:
    """Write an untrained fp32 Qwen3-VL of two layers, hidden 128, with a tower of 2 x 64; return its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = build_tokenizer(more)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(_IDS, VISION_TOKENS, strict=True)}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
    }
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
    }
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0, 1]}
    tied = {"tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3_vl", text_config=text | tied, vision_config=vision, **tied, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        if more:  # the task `zoom`: places as clear as contents; with Qwen's 0.02 the model learns no place
            torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    numbers: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"}
    numbers |= {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    numbers |= {"size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 64 * (2 * PATCH) ** 2}}
    numbers |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(numbers, indent=2))
    return sum(parameter.numel() for parameter in model.parameters())


_IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")


def write_quickstart(out: Path, seed: int, task: str = "count") -> dict[str, int]:
    """Write model and data under `out`; returns how many parameters and rows there are."""
    generator = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    zooms = task == "zoom"
    counts = {"parameters": write_model(out / "model", seed, (*CALL, *BOXES) if zooms else ())}
    for name, number in (("sft", NUM_TRAIN), ("train", NUM_TRAIN), ("eval", NUM_EVAL)):
        made = zoom_rows(number, generator, name == "sft") if zooms else rows(number, generator)
        write_rows(out / f"{name}.parquet", made)
        counts[name] = number
    return counts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write a tiny untrained model that sees, and shapes to count.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the pictures")
    parser.add_argument("--task", choices=["count", "zoom"], default="count", help="what the pictures ask for")
    args = parser.parse_args()
    counts = write_quickstart(args.out, args.seed, args.task)
    print(f"{args.out}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
