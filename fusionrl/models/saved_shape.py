"""The shape that a checkpoint has, compared with the model's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusionrl.models.shape import ModelShape


def shape_difference(path: str | Path, saved: Mapping[str, Any], shape: ModelShape) -> str | None:
    """Compare `saved`, the shape in the description of the checkpoint at `path`, with the model's.

    Returns:
        A message with both values of the first field that differs; None where all are equal.

    Raises:
        KeyError, TypeError, ValueError: another version wrote `saved`.
    """
    before = ModelShape(**saved).model_dump()
    for name, value in shape.model_dump().items():
        if before[name] != value:
            return (
                f"checkpoint {path}: its model has {name} {before[name]!r}, --hf-checkpoint "
                f"has {value!r}; give the model that the run was started with"
            )
    return None
