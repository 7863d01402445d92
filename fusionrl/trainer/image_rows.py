"""The images of a packed row: positions of its tokens on three axes, and the images that this rank puts into it.

Both follow from the spans that were recorded with the samples; no position is guessed from token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from fusionrl.data.train_batch import ShardSpan, TrainShard
from fusionrl.models.vision import VisionShape, positions

if TYPE_CHECKING:
    from fusionrl.trainer.packed_batch import BatchOptions
    from fusionrl.trainer.packed_row import PackedRow


@dataclass
class ImageRows:
    """Images of a micro-batch that have a token on this rank; each is there once.

    images   key → [height, width, channels] uint8, in host memory
    rows     [n] places in this rank's embeddings that images fill
    sources  [n] which of the images' features fills each
    deep     features of each layer of deepstack, once the tower has run; detached from the graph
    grads    gradients of these, while backward runs
    """

    images: dict[str, np.ndarray]
    rows: Tensor
    sources: Tensor
    deep: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    @classmethod
    def blank(cls, shape: VisionShape, device: torch.device) -> Self:
        """A black image of one feature, which no token has."""
        nowhere = torch.zeros(0, dtype=torch.int64, device=device)
        return cls({"": np.zeros((shape.unit, shape.unit, shape.channels), np.uint8)}, nowhere, nowhere)


def prompt_keys(shard: TrainShard, samples: Sequence[int], prompts: Sequence[int]) -> list[bytes]:
    """Return of each sample what tells its prompt from others of the same ids: its images. [] without images."""
    if not shard.spans:
        return []
    return [
        repr([span for span in shard.spans[i] if span[0] < prompt]).encode()
        for i, prompt in zip(samples, prompts, strict=True)
    ]


def place_images(shard: TrainShard, samples: Sequence[int], row: PackedRow, options: BatchOptions) -> None:
    """Write the positions of the row of `samples` and this rank's images into its layout."""
    shape = options.vision
    assert shape is not None, "a model that sees no images has no spans"
    spans = [shard.spans[i] for i in samples] if shard.spans else [[] for _ in samples]
    if shape.mrope_section is not None:
        row.layout.axes = torch.from_numpy(_positions(row, spans, shape)).to(options.device)
    if options.runs_tower:
        row.layout.images = _image_rows(shard, spans, row, options, shape)


def _positions(row: PackedRow, spans: Sequence[Sequence[ShardSpan]], shape: VisionShape) -> np.ndarray:
    """[3, T] of the row of all context-parallel ranks; 0 where it is padded."""
    axes = np.zeros((3, row.local.numel()), np.int64)
    for of_sample, places in zip(spans, row.rows, strict=False):
        axes[:, places] = positions(places.size, [(first, shape.merged(grid)) for first, _, grid in of_sample])
    return axes


def _image_rows(
    shard: TrainShard,
    spans: Sequence[Sequence[ShardSpan]],
    row: PackedRow,
    options: BatchOptions,
    shape: VisionShape,
) -> ImageRows | None:
    slicing = options.slicing
    length = row.held.numel() // slicing.sequence_parallel_size
    start = length * slicing.sequence_parallel_rank
    images: dict[str, np.ndarray] = {}
    firsts: dict[str, int] = {}  # of the features of each
    rows, sources, filled, num_features = [], [], set(), 0
    for of_sample, places in zip(spans, row.rows, strict=False):
        for first, key, grid in of_sample:
            count = int(np.prod(shape.merged(grid)))
            own = places[first : first + count]  # fewer where the last token is not fed
            if not own.size or own[0] in filled:  # siblings share the places of a prompt
                continue
            filled.add(own[0])
            local = row.local[torch.from_numpy(own)] - start
            here = torch.nonzero((local >= 0) & (local < length))[:, 0]
            if not here.numel():
                continue
            if key not in images:
                images[key] = shard.images[key]
                firsts[key], num_features = num_features, num_features + count
            rows.append(local[here])
            sources.append(firsts[key] + here)
    if not images:
        return None
    return ImageRows(images, torch.cat(rows).to(options.device), torch.cat(sources).to(options.device))
