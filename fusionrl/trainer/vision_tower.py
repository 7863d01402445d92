"""Vision towers as torch modules, with the names of checkpoints; nothing of Megatron, whose hooks before a module's
forward pass wait for its weights: a weight is read by its own module's `forward` alone.

A patch is embedded by one product with a matrix, as the kernel of the convolution is as large as its stride. Attention
is within segments (whole images, or windows of them): all segments of one length are one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusionrl.models.families.vision import DeepstackTower, MoonTower, WindowTower
from fusionrl.models.vision import Grid, VisionShape

Groups: TypeAlias = "list[tuple[int, Tensor | None]]"
"""(length, the patches of all segments of this length; None: all patches, in their order)."""


class PixelScale(NamedTuple):
    """How pixels are normalised: the mean and the deviation of each channel, of values between 0 and 1."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class _Places:
    """Where the patches of images stand.

    order      [features] the features in the order of windows; None: in the order of images
    cos, sin   [patches, 1, d / 2] of each patch's place in its image, by which heads are turned
    neighbours  pairs of neighbours in a head are turned, not its halves
    whole, windows  segments: images, and windows
    """

    order: Tensor | None
    cos: Tensor
    sin: Tensor
    neighbours: bool
    whole: Groups
    windows: Groups


class _Attention(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.num_heads, size = shape.num_heads, shape.hidden_size
        self.qkv, self.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor, places: _Places, groups: Groups) -> Tensor:
        """[patches, h] → the same shape, not yet added to it."""
        query, key, value = self.qkv(x).view(x.size(0), 3, self.num_heads, -1).unbind(1)
        parts = _turned(query, places), _turned(key, places), value
        if x.dtype is torch.bfloat16 and x.device.type == "cpu":  # torch's CPU kernel is several times slower in bf16
            parts = tuple(part.float() for part in parts)
        out: Tensor | None = None
        for length, index in groups:
            segments = (
                (part if index is None else part.index_select(0, index)).unflatten(0, (-1, length)).transpose(1, 2)
                for part in parts
            )
            rows = F.scaled_dot_product_attention(*segments).transpose(1, 2).flatten(0, 1)
            if index is None:
                out = rows
            else:
                out = (torch.zeros_like(parts[0]) if out is None else out).index_copy(0, index, rows)
        assert out is not None, "a tower runs over one image at least"
        return self.proj(out.flatten(1).to(x.dtype))


def _turned(x: Tensor, places: _Places) -> Tensor:
    """Heads [patches, heads, d] whose halves are turned against each other, in fp32 meanwhile.

    Of neighbours the first ones come first then, in queries as in keys.
    """
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1) if places.neighbours else x.float().chunk(2, -1)
    cos, sin = places.cos, places.sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class _GatedMlp(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        size, width = shape.hidden_size, shape.ffn_hidden_size
        self.gate_proj, self.up_proj = nn.Linear(size, width), nn.Linear(size, width)
        self.down_proj = nn.Linear(width, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Mlp(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        size, width = shape.hidden_size, shape.ffn_hidden_size
        self.linear_fc1, self.linear_fc2 = nn.Linear(size, width), nn.Linear(width, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, shape: VisionShape, norm: type[nn.Module], mlp: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = (norm(shape.hidden_size, eps=shape.epsilon) for _ in range(2))
        self.attn, self.mlp = _Attention(shape), mlp(shape)

    def forward(self, x: Tensor, places: _Places, groups: Groups) -> Tensor:
        x = x + self.attn(self.norm1(x), places, groups)
        return x + self.mlp(self.norm2(x))


class _WindowMerger(nn.Module):
    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.size = shape.hidden_size * shape.merge**2
        self.ln_q = nn.RMSNorm(shape.hidden_size, eps=shape.epsilon)
        self.mlp = nn.Sequential(
            nn.Linear(self.size, self.size), nn.GELU(), nn.Linear(self.size, shape.out_hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[patches, h] → [features, hidden size of the text model]."""
        return self.mlp(self.ln_q(x).view(-1, self.size))


class _Merger(nn.Module):
    """The norm is over a patch, or with `joins_first` over the patches that become one feature."""

    def __init__(self, shape: VisionShape, joins_first: bool) -> None:
        super().__init__()
        self.size, self.joins_first = shape.hidden_size * shape.merge**2, joins_first
        self.norm = nn.LayerNorm(self.size if joins_first else shape.hidden_size, eps=shape.epsilon)
        self.linear_fc1, self.linear_fc2 = (
            nn.Linear(self.size, self.size),
            nn.Linear(self.size, shape.out_hidden_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[patches, h] → [features, hidden size of the text model]."""
        x = self.norm(x.view(-1, self.size)) if self.joins_first else self.norm(x).view(-1, self.size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class _PatchProjection(nn.Module):
    def __init__(self, shape: VisionShape, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.hidden_size, *shape.kernel))
        self.bias = nn.Parameter(torch.empty(shape.hidden_size)) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, values of one] → [patches, h]."""
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class _PatchEmbedding(nn.Module):
    def __init__(self, shape: VisionShape, bias: bool) -> None:
        super().__init__()
        self.proj = _PatchProjection(shape, bias)

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, values of one] → [patches, h]."""
        return self.proj(patches)


class _PlaceTable(nn.Module):
    def __init__(self, shape: DeepstackTower, bicubic: bool) -> None:
        super().__init__()
        self.weight, self.sides = nn.Parameter(torch.empty(dict(shape.tensors())["pos_embed.weight"])), shape.table
        self.mode, self.align_corners = ("bicubic", False) if bicubic else ("bilinear", True)

    def forward(self, grid: Grid, merge: int) -> Tensor:
        """[patches of an image, h]: the table, stretched to the image."""
        times, height, width = grid
        table = self.weight.float().view(1, *self.sides, -1).permute(0, 3, 1, 2)
        values = F.interpolate(table, (height, width), mode=self.mode, align_corners=self.align_corners)
        values = values[0].permute(1, 2, 0).reshape(height // merge, merge, width // merge, merge, -1).transpose(1, 2)
        return values.reshape(height * width, -1).repeat(times, 1).to(self.weight.dtype)


class Tower(nn.Module):
    """A tower: images in, features out. Its weights are not initialised.

    recompute  each block is computed again in backward; it keeps its input alone
    """

    norm: ClassVar[type[nn.Module]]
    mlp: ClassVar[type[nn.Module]]
    has_patch_bias: ClassVar[bool]
    neighbours: ClassVar[bool] = False  # see `_Places`

    def __init__(self, shape: VisionShape, scale: PixelScale, recompute: bool = False) -> None:
        super().__init__()
        self.shape, self.scale, self.recompute = shape, scale, recompute
        self.patch_embed = _PatchEmbedding(shape, self.has_patch_bias)
        self.blocks = nn.ModuleList([_Block(shape, self.norm, self.mlp) for _ in range(shape.num_layers)])

    def forward(self, images: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Images [height, width, channels] uint8 → features [sum of their tokens, hidden size of the text model], and
        those of each layer of deepstack."""
        grids = [self.shape.grid(image.size(0), image.size(1)) for image in images]
        x = self.embed(torch.cat([self.patches(image) for image in images]), grids)
        places = self.places(grids, x.device)
        if places.order is not None:
            x = self._by_features(x).index_select(0, places.order).flatten(0, 1)
        recomputes, deep = self.recompute and torch.is_grad_enabled(), []
        for number, block in enumerate(self.blocks):
            groups = self.groups(number, places)
            if recomputes:
                x = checkpoint(block, x, places, groups, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, places, groups)
            if number in self.shape.deepstack:
                deep.append(self.deep_features(self.shape.deepstack.index(number), x))
        features = self.features(x)
        if places.order is not None:
            features = features.index_select(0, torch.argsort(places.order))
        return features, deep

    def embed(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[patches, values] → [patches, h]."""
        return self.patch_embed(patches)

    def groups(self, number: int, places: _Places) -> Groups:
        """The segments of block `number`."""
        return places.whole

    def features(self, x: Tensor) -> Tensor:
        """[patches, h] of the last block → [features, hidden size of the text model]."""
        return self.merger(x)

    def deep_features(self, number: int, x: Tensor) -> Tensor:
        """Features of deepstack's layer `number`."""
        raise NotImplementedError

    def patches(self, image: Tensor) -> Tensor:
        """[height, width, channels] uint8 → [patches, values of one] fp32.

        Patches of one feature follow one another; a patch has its channels one after the other, each once for each of
        its times.
        """
        shape, size, merge = self.shape, self.shape.patch_size, self.shape.merge
        mean, std = (torch.tensor(numbers, device=image.device) for numbers in (self.scale.mean, self.scale.std))
        values = (image.float() * (1 / 255) - mean) / std
        values = values.view(-1, merge, size, image.size(1) // size // merge, merge, size, shape.channels)
        values = values.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
        return values.expand(*values.shape[:5], shape.temporal_patch_size, size, size).reshape(-1, shape.patch_dim)

    def places(self, grids: Sequence[Grid], device: torch.device) -> _Places:
        """Return the places of all patches of images of these sizes, in the order of the blocks."""
        rows = torch.cat([_rows_and_columns(grid, self.shape.merge) for grid in grids])
        lengths = [height * width for times, height, width in grids for _ in range(times)]
        order, windows = self.windows(grids)
        if order is not None:
            rows, order = self._by_features(rows).index_select(0, order).flatten(0, 1), order.to(device)
        quarter = self.shape.hidden_size // self.shape.num_heads // 4
        base = 10000.0 ** (torch.arange(quarter, dtype=torch.float32) / quarter)
        # By rows and then by columns, or by column and row in turn.
        angles = rows.flip(1)[:, None] / base[:, None] if self.neighbours else rows[:, :, None] / base
        angles = angles.flatten(1)[:, None]
        turns = angles.cos().to(device), angles.sin().to(device)
        groups = _groups(lengths, device), _groups(windows or lengths, device)
        return _Places(order, *turns, self.neighbours, *groups)

    def windows(self, grids: Sequence[Grid]) -> tuple[Tensor | None, list[int]]:
        """(features in the order of windows, patches of each window); (None, []): it has no windows."""
        return None, []

    def _by_features(self, x: Tensor) -> Tensor:
        """[patches, …] → [features, merge², …]."""
        return x.unflatten(0, (-1, self.shape.merge**2))


class WindowedTower(Tower):
    """Qwen2.5-VL's."""

    norm, mlp, has_patch_bias = nn.RMSNorm, _GatedMlp, False
    shape: WindowTower

    def __init__(self, shape: WindowTower, scale: PixelScale, recompute: bool = False) -> None:
        super().__init__(shape, scale, recompute)
        self.merger = _WindowMerger(shape)

    def groups(self, number: int, places: _Places) -> Groups:
        """Windows, but in a few blocks."""
        return places.whole if number in self.shape.full_layers else places.windows

    def windows(self, grids: Sequence[Grid]) -> tuple[Tensor | None, list[int]]:
        """Windows from the top left on; those at the other sides may be smaller."""
        side, orders, lengths, first = self.shape.window_size // self.shape.unit, [], [], 0
        for grid in grids:
            order, features = _windows(self.shape.merged(grid), side)
            orders.append(order + first)
            lengths += [count * self.shape.merge**2 for count in features]
            first += order.numel()
        return torch.cat(orders), lengths


class StackedTower(Tower):
    """Qwen3-VL's and Qwen3.5's."""

    norm, mlp, has_patch_bias = nn.LayerNorm, _Mlp, True
    bicubic: ClassVar[bool] = False
    shape: DeepstackTower

    def __init__(self, shape: DeepstackTower, scale: PixelScale, recompute: bool = False) -> None:
        super().__init__(shape, scale, recompute)
        self.pos_embed = _PlaceTable(shape, self.bicubic)
        self.merger = _Merger(shape, joins_first=False)
        self.deepstack_merger_list = nn.ModuleList([_Merger(shape, joins_first=True) for _ in shape.deepstack])

    def embed(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """With the table of positions, stretched to each image."""
        stretched = {grid: self.pos_embed(grid, self.shape.merge) for grid in dict.fromkeys(grids)}
        return super().embed(patches, grids) + torch.cat([stretched[grid] for grid in grids])

    def deep_features(self, number: int, x: Tensor) -> Tensor:
        """By a merger of their own."""
        return self.deepstack_merger_list[number](x)


class MoonVit(StackedTower):
    """Kimi-VL's."""

    neighbours = True
    bicubic = True
    shape: MoonTower

    def __init__(self, shape: MoonTower, scale: PixelScale, recompute: bool = False) -> None:
        super().__init__(shape, scale, recompute)
        self.final_norm = nn.LayerNorm(shape.hidden_size, eps=shape.epsilon)

    def features(self, x: Tensor) -> Tensor:
        """After a norm over each patch; the merger has one of its own."""
        return super().features(self.final_norm(x))


TOWERS: dict[type[VisionShape], type[Tower]] = {
    WindowTower: WindowedTower,
    DeepstackTower: StackedTower,
    MoonTower: MoonVit,
}


@lru_cache(maxsize=256)
def _rows_and_columns(grid: Grid, merge: int) -> Tensor:
    """[patches, 2] fp32, in the order of patches."""
    times, height, width = grid
    places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), -1)
    places = places.reshape(height // merge, merge, width // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
    return places.repeat(times, 1).float()


@lru_cache(maxsize=256)
def _windows(grid: Grid, side: int) -> tuple[Tensor, list[int]]:
    """(features of one image window by window, features of each window)."""
    times, height, width = grid
    features = torch.arange(times * height * width).view(times, height, width)
    parts = [
        features[time, row : row + side, column : column + side].flatten()
        for time in range(times)
        for row in range(0, height, side)
        for column in range(0, width, side)
    ]
    return torch.cat(parts), [part.numel() for part in parts]


def _groups(lengths: list[int], device: torch.device) -> Groups:
    """Segments one after the other, of these numbers of patches, by their lengths."""
    different = sorted(set(lengths))
    if len(different) == 1:
        return [(lengths[0], None)]
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    return [
        (length, (starts[sizes == length][:, None] + torch.arange(length)).flatten().to(device)) for length in different
    ]
