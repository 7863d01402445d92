"""Floating-point operations of training: of a sequence, of an image, and of the optimizer steps (`perf/mfu`).

Of the matrix products alone: the products with the weights are linear in the length of a sequence, attention quadratic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fusionrl.models.shape import ModelShape
from fusionrl.models.vision import VisionShape


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of training one sequence of `n` tokens: `linear * n + quadratic * n ** 2`."""

    linear: float
    quadratic: float
    windows: tuple[tuple[int, float], ...] = ()  # (size, quadratic) of layers whose tokens see so many

    @classmethod
    def of_shape(cls, shape: ModelShape) -> SequenceCost:
        """Forward and backward of a model: 6 operations a weight that a token passes, and causal attention.

        Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1; PaLM, appendix B, adds attention: it
        multiplies queries by keys and scores by values, 2 operations each for half of all pairs of tokens in forward,
        twice that in backward. The embedding is a lookup and costs nothing; the output layer does cost. Recomputed work
        counts once.
        """
        embedding = shape.vocab_size * shape.hidden_size
        weights = shape.num_active_parameters - (0 if shape.tie_word_embeddings else embedding)
        # Each layer of multi-token prediction reads the output layer once more, which gets no gradient of it.
        further = shape.mtp_layers * (0 if shape.value_head else 4.0 * embedding)
        attention = shape.longer.attention
        linear = 6.0 * weights + sum(kind.token_flops(shape) for kind in attention) + further
        pairs: defaultdict[int | None, float] = defaultdict(float)
        for kind in attention:
            pairs[kind.window] += kind.pair_flops(shape)
        return cls(linear, pairs.pop(None, 0.0), tuple((size, part) for size, part in pairs.items() if size))

    def __call__(self, lengths: np.ndarray | Sequence[int]) -> np.ndarray:
        """[n] lengths → [n] costs, float64."""
        n = np.asarray(lengths, dtype=np.float64)
        within = (quadratic * (n**2 - np.maximum(n - size, 0.0) ** 2) for size, quadratic in self.windows)
        return sum(within, self.linear * n + self.quadratic * n * n)


@dataclass(frozen=True)
class ImageCost:
    """Floating-point operations of an image of `n` tokens in a vision tower: `linear * n + quadratic * n ** 2`.

    A patch passes the blocks, a token the mergers; attention multiplies queries by keys and scores by values, within
    windows or the whole image. Three times that where the tower is trained; recomputed work counts once.
    """

    linear: float
    quadratic: float

    @classmethod
    def of_shape(cls, vision: VisionShape, is_trained: bool) -> ImageCost:
        """Of a tower that is trained, or runs forward alone."""
        times, per_token = 3.0 if is_trained else 1.0, vision.merge**2
        num_windowed, patches = vision.window
        of_patch = 2 * (vision.num_weights("blocks.") + vision.num_weights("patch_embed."))
        of_patch += num_windowed * 4 * vision.hidden_size * patches
        mergers = vision.num_weights("merger.") + vision.num_weights("deepstack_")
        pairs = (vision.num_layers - num_windowed) * 4 * vision.hidden_size * per_token**2
        return cls(times * (per_token * of_patch + 2 * mergers), times * pairs)

    def __call__(self, tokens: int) -> float:
        return self.linear * tokens + self.quadratic * tokens * tokens


@dataclass(frozen=True)
class Work:
    """Sequences that are trained on: the tokens of each, prompts included, and those of each different image."""

    lengths: tuple[int, ...] = ()
    images: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Iterable[int], images: Iterable[int] = ()) -> Work:
        """Of sequences with these numbers of tokens, and different images with these."""
        return cls(tuple(lengths), tuple(images))

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return sum(self.lengths)


def train_flops(shape: ModelShape, work: Work, images: ImageCost | None = None) -> float:
    """FLOPs of the optimizer steps on these sequences, each of which is trained on once; `images`: of their images."""
    of_images = 0.0 if images is None else sum(map(images, work.images))
    return float(SequenceCost.of_shape(shape)(work.lengths).sum()) + of_images
