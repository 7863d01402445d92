"""A model that sees: a vision tower on the first pipeline stage, whose features replace the embeddings of placeholders.

Every tensor-parallel rank has the tower whole, and runs it over those images alone that have a token on its part of the
row; no rank waits for another. Its gradients are those of the rank's own tokens: Megatron sums them over data- and
context-parallel ranks as any others, and over tensor-parallel ranks as those of norms under sequence parallelism.

Where Megatron gathers weights and reduces gradients during the passes, ranks must use the tower's buckets in one order:
a rank without an image in a micro-batch runs its tower over a blank one, whose features nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from fusionrl.data.train_batch import ShardSpan, TrainShard
from fusionrl.models.vision import VisionShape, axes, positions
from fusionrl.plan.memory.activations import KEPT_FEATURES
from fusionrl.trainer.outputs import ChosenOutputs
from fusionrl.trainer.packed_row import PackedLayout
from fusionrl.trainer.vision_tower import TOWERS, PixelScale

if TYPE_CHECKING:
    from fusionrl.trainer.micro_batches import BatchOptions
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
    """Return of each sample what tells its prompt from others of the same ids: its images."""
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


@dataclass(frozen=True)
class Sight:
    """What a model has to see."""

    shape: VisionShape
    scale: PixelScale
    recompute: bool  # the tower's blocks are computed again in backward
    overlaps: bool  # gradients are reduced during backward


class SeeingModel(ChosenOutputs):
    """A policy that sees images, which it finds in the layout of a micro-batch (`PackedLayout.images`)."""

    def __init__(self, config: TransformerConfig, *args: object, sight: Sight, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.sight = sight
        self._lanes: Tensor | None = None  # by which axis each pair of dimensions is turned
        self._features: dict[str, tuple[Tensor, ...]] = {}  # of a frozen tower, by image
        if not self.pre_process:
            return
        with torch.device("meta"):  # its weights come from the checkpoint
            tower = TOWERS[type(sight.shape)](sight.shape, sight.scale, sight.recompute)
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.vision_model = tower.to(config.params_dtype).to_empty(device=device)
        for parameter in tower.parameters():
            parameter.sequence_parallel = config.sequence_parallel
            # Each rank has the whole gradient otherwise, up to the order in which kernels add.
            parameter.average_gradients_across_tp_domain = not config.sequence_parallel
        depth = len(sight.shape.deepstack)
        if len(self.decoder.layers) < depth:
            raise ValueError(
                f"features of images enter the first {depth} layers, but the first pipeline piece has"
                f" {len(self.decoder.layers)}; change --pipeline-model-parallel-layout or the pipeline's sizes"
            )
        for number in range(depth):
            self.decoder.layers[number].register_forward_hook(_adds_features(number), with_kwargs=True)

    def forget_images(self) -> None:
        """Drop the features of images that a frozen tower has kept."""
        self._features = {}

    def _preprocess(self, *args: object, packed_seq_params: object = None, **kwargs: object) -> tuple[object, ...]:
        assert isinstance(packed_seq_params, PackedLayout), "packed sequences only"
        places = packed_seq_params.axes
        preprocess = ChosenOutputs._preprocess if places is None else GPTModel._preprocess
        parts: Any = preprocess(self, *args, packed_seq_params=packed_seq_params, **kwargs)
        hidden, table = parts[0], parts[1]
        if self.pre_process:
            hidden = self._with_images(hidden, packed_seq_params.images)
        if places is None:
            return (hidden, *parts[1:])
        # One entry a packed token, of the row of all ranks: Megatron then applies it as it is, each rank its part.
        return (hidden, self._angles(table[:, 0, 0], places)[:, None, None], *parts[2:])

    def _angles(self, table: Tensor, places: Tensor) -> Tensor:
        """[longest, d] and positions [3, T] → [T, d]: each pair of dimensions by the position on its axis."""
        shape, num_lanes = self.sight.shape, table.size(1) // 2
        if self._lanes is None:
            assert shape.mrope_section is not None
            self._lanes = torch.from_numpy(axes(shape.mrope_section, shape.mrope_interleaved, num_lanes))
            self._lanes = self._lanes.to(table.device)
        angles = table[places[self._lanes].t(), torch.arange(num_lanes, device=table.device)]
        return torch.cat([angles, angles], -1)

    def _with_images(self, hidden: Tensor, images: ImageRows | None) -> Tensor:
        """Embeddings [T / sequence parallel size, 1, h] with the features of images in their places."""
        is_trained = any(parameter.requires_grad for parameter in self.vision_model.parameters())
        if images is None:
            if not (is_trained and self.sight.overlaps):
                return hidden
            images = ImageRows.blank(self.sight.shape, hidden.device)
        features, deep = self._run(images.images.values()) if is_trained else self._frozen(images)
        images.deep = [part.detach() for part in deep]
        return _Merge.apply(hidden[:, 0], images, features, *deep)[:, None]

    def _run(self, images: Iterable[np.ndarray]) -> tuple[Tensor, list[Tensor]]:
        device = next(self.vision_model.parameters()).device
        features, deep = self.vision_model([torch.tensor(image).to(device) for image in images])
        return features, deep

    @torch.no_grad()
    def _frozen(self, images: ImageRows) -> tuple[Tensor, list[Tensor]]:
        """The same by a tower that nothing trains: an image passes it once."""
        known = dict(self._features)
        if new := {key: image for key, image in images.images.items() if key not in known}:
            features, deep = self._run(new.values())
            counts = [self.sight.shape.num_image_tokens(*image.shape[:2]) for image in new.values()]
            split = zip(*(part.split(counts) for part in (features, *deep)), strict=True)
            known |= zip(new, split, strict=True)
            num_bytes = sum(part.nbytes for parts in known.values() for part in parts)
            self._features = known if num_bytes <= KEPT_FEATURES else self._features
        features, *deep = map(torch.cat, zip(*(known[key] for key in images.images), strict=True))
        return features, deep


def _adds_features(number: int) -> Callable[..., object]:
    """After a decoder layer: features of deepstack's layer `number` are added to the hidden states of images.

    The images are those of the layer's own argument, and so of its micro-batch, also when it runs again in backward
    while others are in flight.
    """

    def add(module: torch.nn.Module, args: object, kwargs: Mapping[str, object], output: tuple[Tensor, ...]) -> object:
        layout = kwargs["packed_seq_params"]
        assert isinstance(layout, PackedLayout)
        if (images := layout.images) is None:
            return output
        hidden = _Add.apply(output[0], images, images.deep[number], number)
        if not module.training:  # while the tower's features of all micro-batches would stay
            images.deep[number] = hidden.new_empty(0)
        return (hidden, *output[1:])

    return add


class _Merge(torch.autograd.Function):
    """Put features into embeddings [T, h], which may be in fp32 where the tower is in bf16.

    Its backward runs after those of all layers, and is the only one through which gradients reach the tower: also those
    that `_Add` has put aside. So the tower's backward runs once, whatever layers are computed again.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, embeddings: Tensor, images: ImageRows, features: Tensor, *deep: Tensor) -> Tensor:
        ctx.images, ctx.shape, ctx.dtype = images, features.shape, features.dtype
        images.grads = [torch.zeros_like(part) for part in deep] if any(ctx.needs_input_grad[2:]) else []
        return embeddings.index_copy(0, images.rows, features.index_select(0, images.sources).to(embeddings.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        images: ImageRows = ctx.images
        own = None
        if ctx.needs_input_grad[2]:
            own = _gathered(grad.new_zeros(ctx.shape, dtype=ctx.dtype), images, grad)
        deep = images.grads or [None] * len(images.deep)
        images.grads, images.deep = [], []
        return grad.index_fill(0, images.rows, 0), None, own, *deep


class _Add(torch.autograd.Function):
    """Add features to hidden states [T, 1, h]; their gradients are put aside for `_Merge`."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, images: ImageRows, deep: Tensor, number: int) -> Tensor:
        ctx.images, ctx.number = images, number
        return hidden.index_add(0, images.rows, deep.index_select(0, images.sources)[:, None].to(hidden.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        images: ImageRows = ctx.images
        if images.grads:
            _gathered(images.grads[ctx.number], images, grad[:, 0])
        return grad, None, None, None


def _gathered(total: Tensor, images: ImageRows, grad: Tensor) -> Tensor:
    """`total` [features, h], to which the gradients of hidden states [T, h] are added."""
    return total.index_add_(0, images.sources, grad.index_select(0, images.rows).to(total.dtype))
