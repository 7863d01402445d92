"""Time vision towers alone: patches a second forward and backward, and the share of attention. Random weights.

    python -m tools.bench.tower [--device cuda] [--patches 4096] [--images 8] [--turns 10]

Sizes of Qwen2.5-VL-7B (attention within windows, and to whole images in every eighth block) and of Qwen3-VL-8B.
Attention is torch's over segments of one length; its share is what goes where it is left out. Prints one JSON object.
"""

import argparse
import json
import time
from typing import Any
from unittest.mock import patch

import torch

from fusionrl.models.vision import VisionShape
from fusionrl.plan.costs import ImageCost
from fusionrl.trainer.vision_tower import TOWERS, PixelScale
from tests.tiny_vision import random_image
from tools.memory_check import seeing_shape

# Width, width of the MLP, blocks, heads.
SIZES = {"qwen2_5_vl": (1280, 3420, 32, 16), "qwen3_vl": (1152, 4304, 27, 16)}


def shape_of(kind: str, width: int | None, layers: int | None) -> VisionShape:
    """A published tower's sizes, or smaller ones."""
    size, ffn, depth, heads = SIZES[kind]
    vision = seeing_shape(kind, hidden=3584 if width is None else 64, layers=4).vision
    assert vision is not None
    fields: dict[str, Any] = {"hidden_size": width or size, "ffn_hidden_size": 2 * width if width else ffn}
    fields |= {"num_layers": layers or depth, "num_heads": 2 if width else heads}
    if kind == "qwen2_5_vl":
        fields |= {"window_size": 112, "full_layers": tuple(range(7, fields["num_layers"], 8))}
    return vision.model_copy(update=fields)


def seconds(tower: torch.nn.Module, images: list[torch.Tensor], turns: int) -> float:
    """Of one pass forward and backward, after one to warm up."""

    def step() -> None:
        features, deep = tower(images)
        sum((part.float().sum() for part in (features, *deep)), torch.zeros((), device=features.device)).backward()
        if features.is_cuda:
            torch.cuda.synchronize()

    step()
    start = time.perf_counter()
    for _ in range(turns):
        step()
    return (time.perf_counter() - start) / turns


def measure(kind: str, options: argparse.Namespace) -> str:
    """Figures in one line."""
    shape = shape_of(kind, options.width, options.layers)
    device = torch.device(options.device)
    with device:
        tower = TOWERS[type(shape)](shape, PixelScale()).to(torch.bfloat16)
    rows = max(int(options.patches**0.5) // 4 * 4, 4)
    sizes = [(rows, max(options.patches // rows // 4 * 4, 4))] * options.images
    pictures = [random_image(i, *size, patch=shape.patch_size) for i, size in enumerate(sizes)]
    images = [torch.from_numpy(picture).to(device) for picture in pictures]
    whole = seconds(tower, images, options.turns)
    with patch("torch.nn.functional.scaled_dot_product_attention", lambda query, key, value: value):
        without = seconds(tower, images, options.turns)
    patches = sum(columns * rows for columns, rows in sizes)
    operations = sum(
        map(ImageCost.of_shape(shape, True), [patches // options.images // shape.merge**2] * options.images)
    )
    return (
        f"{patches / whole:.0f} patches/s, {operations / whole:.2e} operations/s, attention {1 - without / whole:.0%}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time vision towers alone.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--patches", type=int, default=4096, help="of an image")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--width", type=int, help="another width of a block")
    parser.add_argument("--layers", type=int, help="another number of blocks")
    options = parser.parse_args()
    print(json.dumps({kind: measure(kind, options) for kind in SIZES}, indent=1))


if __name__ == "__main__":
    main()
