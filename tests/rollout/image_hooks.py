"""A tool that answers with images."""

import io
from typing import Any

from PIL import Image

from fusionrl.rollout.tools import ToolAnswer, function_schema


class Draw:
    schema = function_schema("draw", "Draw something.", what="Its name.")

    async def __call__(self, what: str) -> ToolAnswer:
        file = io.BytesIO()
        Image.new("L", (70, 70), 9).save(file, "JPEG")
        images: dict[str, Any] = {
            "two": [Image.new("RGBA", (64, 64)), file.getvalue()],
            "thin": [Image.new("RGB", (1, 500))],
            "cut": [file.getvalue()[:-40]],
            "cut while it is read": [Image.open(io.BytesIO(file.getvalue()[:-40]))],
        }
        return ToolAnswer(images=images[what])


def tools(args: Any, sample: Any) -> list[Any]:
    return [Draw()]
