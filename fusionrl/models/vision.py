"""Vision towers: their sizes and tensors, and the positions of text and images in a sequence. Pure, without torch.

A tower turns the patches of an image into features, `merge` x `merge` of them into one, and each of these replaces the
embedding of one placeholder token. A kind of tower is a subclass of `VisionShape`
(`models/families/vision.py`); its torch module is in the table `TOWERS` of `trainer/vision_tower.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import ClassVar, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fusionrl.models.rules import VISION, Rule, Sizes

Grid: TypeAlias = tuple[int, int, int]
"""An image in patches, or in merged patches: times, rows, columns. A still image has one time."""


NAMES = "visual."
"""Prefix of a tower's tensors, whatever files have (`models/hf_folder.py`)."""


class VisionShape(BaseModel):
    """Sizes of a vision tower of `num_layers` blocks, and what its model says of images among tokens.

    merge              so many by so many patches become one feature, of `out_hidden_size`
    image_token        id of the placeholder
    mrope_section      of half a head's dimensions, so many are turned by time, row and column; None: all by the place
                       in the sequence, as for text
    mrope_interleaved  these dimensions are mixed (Qwen3-VL), not one part after the other
    """

    model_config = ConfigDict(frozen=True)

    # Ends of modules' names: engines' ranks divide their rows or their columns; an engine's module → those in it.
    engine_rows: ClassVar[tuple[str, ...]] = ()
    engine_columns: ClassVar[tuple[str, ...]] = ()
    engine_joined: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    engine_modules: ClassVar[Mapping[str, str]] = {".attn.qkv.": ".attn.qkv_proj."}  # modules that they call otherwise
    engine_multiple: ClassVar[int] = 1  # engines pad the width of an MLP to a multiple of this
    engine_counts_layers: ClassVar[bool] = False  # config.json says their number where engines look for it

    kept_hidden: ClassVar[int] = 0  # autograd keeps so many times the width of a block for each patch,
    kept_ffn: ClassVar[int] = 0  # and so many times that of its MLP
    epsilon: ClassVar[float] = 1e-6  # of all norms

    kind: str
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    ffn_hidden_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    patch_size: int = Field(gt=0)
    temporal_patch_size: int = Field(gt=0)
    channels: int = Field(gt=0)
    merge: int = Field(gt=0)
    out_hidden_size: int = Field(gt=0)
    image_token: int
    mrope_section: tuple[int, int, int] | None
    mrope_interleaved: bool = False

    @property
    def patch_dim(self) -> int:
        """Values of a patch."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def kernel(self) -> Sizes:
        """Sizes of what embeds a patch, for each width of a block."""
        times = (self.temporal_patch_size,) if self.temporal_patch_size > 1 else ()
        return (self.channels, *times, self.patch_size, self.patch_size)

    @property
    def unit(self) -> int:
        """Pixels of one feature's side: an image's height and width are multiples of it."""
        return self.patch_size * self.merge

    @property
    def deepstack(self) -> tuple[int, ...]:
        """Blocks after which features are added to the hidden states of the decoder's first layers."""
        return ()

    def check(self, hidden_size: int, num_lanes: int, num_layers: int) -> None:
        """Raise ValueError for a tower that does not fit a text model of these sizes."""
        if self.out_hidden_size != hidden_size:
            raise ValueError(f"out_hidden_size {self.out_hidden_size} of the tower, hidden_size {hidden_size}")
        if self.mrope_section is not None and sum(self.mrope_section) != num_lanes:
            raise ValueError(f"mrope_section {list(self.mrope_section)} for {num_lanes} pairs of dimensions of a head")
        if len(self.deepstack) > num_layers:
            raise ValueError(f"{len(self.deepstack)} deepstack_visual_indexes for a decoder of {num_layers} layers")

    @property
    def kept_values(self) -> int:
        """Values that a block keeps of a patch for backward, as measured on the local layers."""
        return self.kept_hidden * self.hidden_size + self.kept_ffn * self.ffn_hidden_size

    @property
    def window(self) -> tuple[int, int]:
        """(blocks that attend within windows, patches of a window)."""
        return 0, 0

    def grid(self, height: int, width: int) -> Grid:
        """The patches of an image of so many pixels, which are multiples of `unit`."""
        return (1, height // self.patch_size, width // self.patch_size)

    def merged(self, grid: Grid) -> Grid:
        """Its features, where `grid` counts patches."""
        return (grid[0], grid[1] // self.merge, grid[2] // self.merge)

    def num_image_tokens(self, height: int, width: int) -> int:
        """Placeholder tokens of an image of so many pixels, which are multiples of `unit`."""
        return prod(self.merged(self.grid(height, width)))

    def tensors(self) -> Iterator[tuple[str, Sizes]]:
        """(name without its prefix, shape) of each tensor."""
        raise NotImplementedError

    def num_weights(self, prefix: str = "") -> int:
        """Values of the tensors, but of norms and biases, whose names begin so."""
        return sum(prod(sizes) for name, sizes in self.tensors() if name.startswith(prefix) and len(sizes) > 1)

    def num_whole_weights(self) -> int:
        """Those of `num_weights` that each of an engine's ranks has whole."""
        divided = (*self.engine_rows, *self.engine_columns, "attn.qkv", "wqkv")
        named = ((self.stored(name).rpartition(".")[0], sizes) for name, sizes in self.tensors() if len(sizes) > 1)
        return sum(prod(sizes) for module, sizes in named if not module.endswith(divided))

    def rules(self) -> Iterator[Rule]:
        """The rules of its tensors, which every tensor-parallel rank has whole."""
        for name, sizes in self.tensors():
            yield Rule(f"{VISION}{name}", {f"{NAMES}{self.stored(name)}": sizes})

    def stored(self, name: str) -> str:
        """Return the name that files give the tensor `name`, without the tower's prefix."""
        return name


def positions(length: int, spans: Sequence[tuple[int, Grid]]) -> np.ndarray:
    """Return [3, length] int64, the positions in time, row and column of a sequence's tokens (Qwen2-VL,
    arXiv:2409.12191).

    Text moves all three by one. A token of an image has its place in the image, counted from the position of the image;
    text continues after the largest of these.

    spans: (first token, merged patches) of each image, ascending; the last may be cut off by `length`.
    """
    places, token, position = np.empty((3, length), np.int64), 0, 0
    for start, grid in spans:
        places[:, token:start] = position + np.arange(start - token)
        position += start - token
        token = start + prod(grid)
        places[:, start:token] = (position + np.indices(grid).reshape(3, -1))[:, : length - start]
        position += max(grid)
    if token < length:
        places[:, token:] = position + np.arange(length - token)
    return places


def axes(section: tuple[int, int, int], interleaved: bool, num_lanes: int) -> np.ndarray:
    """Return [num_lanes] int64: which position (0 time, 1 row, 2 column) turns each pair of a head's dimensions.

    Interleaved, pairs 1, 4, 7, … below 3 · rows are turned by the row and 2, 5, 8, … below 3 · columns by the column.
    """
    times, rows, columns = section
    if not interleaved:
        return np.repeat([0, 1, 2], [times, rows, columns])
    by = np.zeros(num_lanes, np.int64)
    by[1 : rows * 3 : 3], by[2 : columns * 3 : 3] = 1, 2
    return by
