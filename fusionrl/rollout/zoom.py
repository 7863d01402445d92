"""`image_zoom_in_tool`: the model asks for a part of an image, and sees it as large as an image may be.

    --custom-generate-function-path fusionrl.rollout.agent.generate --tools-path fusionrl.rollout.zoom.tools

DeepEyes' tool (arXiv:2505.14362). The part is cut out of the original, which may have many more pixels than the model
has seen of it.
"""

from __future__ import annotations

import asyncio
import math
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Literal

from fusionrl.data.image_store import IMAGES
from fusionrl.data.images import ImageRef, content_size
from fusionrl.data.sample import Sample
from fusionrl.models.families import published_form
from fusionrl.models.shape import read_hf_config
from fusionrl.rollout.tools import ToolAnswer, ToolError

if TYPE_CHECKING:
    from PIL.Image import Image

Coordinates = Literal["pixels", "thousandths"]
Box = tuple[int, int, int, int]
_MAX_ASPECT = 100
_MIN_SIDE = 28  # pixels of the original; smaller parts are grown
_UNITS = {
    "pixels": "pixels of the image",
    "thousandths": "thousandths of the image's width and height",
}


def tools(args: Namespace, sample: Sample) -> list[ZoomTool]:
    """Return the tool for a sample, for --tools-path."""
    return [ZoomTool(sample, coordinates_of(args))]


def coordinates_of(args: Namespace) -> Coordinates:
    """Return --zoom-coordinates, or for auto how the model's family gives boxes."""
    if args.zoom_coordinates != "auto":
        chosen: Coordinates = args.zoom_coordinates
        return chosen
    model_type = read_hf_config(args.hf_checkpoint, "--hf-checkpoint").get("model_type")
    form = published_form(str(model_type))
    return "pixels" if form is not None and form.boxes_in_pixels else "thousandths"


class ZoomTool:
    """Shows parts of a sample's images, those that it has shown before included."""

    def __init__(self, sample: Sample, coordinates: Coordinates) -> None:
        self._sample, self._coordinates = sample, coordinates
        self.schema: dict[str, Any] = {**_schema(coordinates)}

    async def __call__(self, bbox_2d: list[float], label: str = "", image_index: int = 0) -> ToolAnswer:
        """Return the part of an image. Raises ToolError for a box or an image that does not exist."""
        images = [image for _, image in self._sample.image_spans]
        if not 0 <= image_index < len(images):
            raise ToolError(f"image_index {image_index}: there are {len(images)} images, the first is 0")
        image_index = int(image_index)  # a JSON schema's integer may be 0.0
        part = await asyncio.to_thread(self._cut, images[image_index], bbox_2d)
        return ToolAnswer(f"The part {bbox_2d} of image {image_index}" + (f": {label}" if label else "."), [part])

    def _cut(self, image: ImageRef, box: list[float]) -> Image:
        original = IMAGES.original(image)
        sides = (image.width, image.height) if self._coordinates == "pixels" else (1000, 1000)
        seen, processor = (image.height, image.width), IMAGES.processor
        if processor is not None and processor.limits.pads:  # boxes count black, too
            seen = content_size(original.height, original.width, seen)
        limits = sides[0] * seen[1] / image.width, sides[1] * seen[0] / image.height
        return original.crop(box_in_original(box, limits, original.size))


def box_in_original(box: list[float], sides: tuple[float, float], size: tuple[int, int]) -> Box:
    """Return the pixels (left, top, right, bottom) of the original of `size` (width, height) that a box means.

    sides  width and height of the image in the box's coordinates

    Raises:
        ToolError: the box is empty, outside the image, or too thin.
    """
    x1, y1, x2, y2 = box
    if not all(abs(value) < math.inf for value in box) or x1 >= x2 or y1 >= y2:  # isfinite fails for a long integer
        raise ToolError(f"bbox_2d {box}: give [x1, y1, x2, y2] with x1 < x2 and y1 < y2")
    x1, x2 = (min(max(x, 0), sides[0]) for x in (x1, x2))
    y1, y2 = (min(max(y, 0), sides[1]) for y in (y1, y2))
    if x1 >= x2 or y1 >= y2:
        raise ToolError(f"bbox_2d {box} lies outside the image, which is {sides[0]:g} x {sides[1]:g}")
    left, right = _grown(x1 * size[0] / sides[0], x2 * size[0] / sides[0], size[0])
    top, bottom = _grown(y1 * size[1] / sides[1], y2 * size[1] / sides[1], size[1])
    width, height = right - left, bottom - top
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise ToolError(f"bbox_2d {box} is too thin: one side is over {_MAX_ASPECT} times the other")
    return left, top, right, bottom


def _grown(start: float, end: float, size: int) -> tuple[int, int]:
    """Whole pixels from `start` to `end`, of a side of `size`: at least `_MIN_SIDE` around their middle."""
    first, last = math.floor(start + 1e-6), math.ceil(end - 1e-6)  # not for rounding alone
    if (missing := min(_MIN_SIDE, size) - (last - first)) > 0:
        first = min(max(first - missing // 2, 0), size - min(_MIN_SIDE, size))
        last = first + min(_MIN_SIDE, size)
    return first, last


def _schema(coordinates: Coordinates) -> dict[str, object]:
    box = {
        "type": "array",
        "items": {"type": "number"},
        "minItems": 4,
        "maxItems": 4,
        "description": f"The part as [x1, y1, x2, y2] in {_UNITS[coordinates]}: its left, upper, right and lower edge.",
    }
    properties = {
        "bbox_2d": box,
        "label": {"type": "string", "description": "What is in the part."},
        "image_index": {"type": "integer", "description": "Number of the image; the first, which is usual, is 0."},
    }
    function = {
        "name": "image_zoom_in_tool",
        "description": "Zoom into a part of an image, and look at it in its full size.",
        "parameters": {"type": "object", "properties": properties, "required": ["bbox_2d"]},
    }
    return {"type": "function", "function": function}
