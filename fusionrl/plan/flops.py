"""FLOPs of a model's forward and backward passes, of the matrix products alone: the numerator of `perf/mfu`.

A matrix of N parameters takes 2 N FLOPs a token in the forward pass and 4 N in the backward pass (Kaplan et al. 2020,
"Scaling Laws for Neural Language Models", section 2.1; PaLM, appendix B, adds attention). Attention looks back alone,
so a sequence of s tokens has s²/2 pairs. Recomputed work counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusionrl.models.shape import ModelShape
from fusionrl.plan.devices import KINDS

_TRAIN_BY_FORWARD = 3.0  # forward and backward


@dataclass(frozen=True)
class Work:
    """Sequences that are trained on: their number of tokens, prompts included, and the sum of the lengths' squares."""

    tokens: int = 0
    squares: int = 0

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Work:
        """Of sequences with these numbers of tokens."""
        lengths = list(lengths)
        return cls(sum(lengths), sum(length**2 for length in lengths))


def forward_flops(shape: ModelShape, work: Work) -> float:
    """FLOPs of one forward pass over the sequences, logits included."""
    embedding = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    matrices = 2.0 * (shape.num_active_parameters - embedding) * work.tokens
    key, value = _head_sizes(shape)
    pairs = work.squares / 2
    return matrices + 2.0 * shape.num_layers * shape.num_attention_heads * (key + value) * pairs


def train_flops(shape: ModelShape, work: Work) -> float:
    """FLOPs of the optimizer steps on these sequences, each of which is trained on once."""
    return _TRAIN_BY_FORWARD * forward_flops(shape, work)


def _head_sizes(shape: ModelShape) -> tuple[int, int]:
    if shape.mla is None:
        return shape.head_dim, shape.head_dim
    return shape.mla.qk_head_dim + shape.mla.qk_pos_emb_head_dim, shape.mla.v_head_dim


def peak_flops(name: str, memory_bytes: float | None = None) -> float | None:
    """Dense bf16 FLOP a second of a GPU by its driver's name ("NVIDIA H100 80GB HBM3"); None: it is in no table.

    memory_bytes  tells kinds of one name apart
    """
    words = name.lower().replace("-", " ").replace("rtx ", "rtx").split()
    if {"pcie", "nvl"} & set(words):  # other figures than the boards that the table has
        return None
    kinds = [kind for short, kind in ((kind.partition("-")[0], kind) for kind in KINDS) if short in words]
    if memory_bytes is not None:
        kinds.sort(key=lambda kind: abs(KINDS[kind].memory - memory_bytes))
    return KINDS[kinds[0]].peak if kinds else None
