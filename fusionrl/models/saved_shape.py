"""The shape that a checkpoint has, compared with the model's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fusionrl.models.shape import ModelShape


def check_saved_shape(path: str | Path, saved: Mapping[str, object], shape: ModelShape) -> None:
    """Compare `saved`, the shape in the description of the checkpoint at `path`, with the model's.

    Raises:
        KeyError, TypeError, ValueError: `saved` is no shape of this version; another ValueError names both values of a
            field that differs.
    """
    before = ModelShape(**saved).model_dump()
    for name, value in shape.model_dump().items():
        if before[name] != value:
            raise ShapeDiffers(
                f"checkpoint {path}: it is of a model with {name} {before[name]!r}, --hf-checkpoint "
                f"has {value!r}; give the model that the run was started with"
            )


class ShapeDiffers(ValueError):
    """A checkpoint of another model; the message names it, and one field with both values."""
