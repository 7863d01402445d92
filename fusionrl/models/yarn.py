"""YaRN (https://arxiv.org/abs/2309.00071): rotary embeddings of a model that reads longer texts than it was trained on.

Fast dimensions turn as before, slow ones `factor` times more slowly, and a ramp lies between the two. Queries and keys
get longer by `attention_factor`, so scores grow by its square.

transformers, SGLang and the trainers have to agree on every number; `check_yarn` refuses what one of them reads in
another way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KNOWN = frozenset(
    ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")
    + ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
)


@dataclass(frozen=True)
class Yarn:
    """The numbers of a config.json's `rope_scaling` of the type yarn."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool

    @classmethod
    def of(cls, scaling: Mapping[str, Any], max_positions: int) -> Yarn:
        """Read the numbers; `max_positions` is the model's max_position_embeddings."""
        return cls(
            float(scaling["factor"]),
            int(scaling.get("original_max_position_embeddings") or max_positions),
            float(scaling.get("beta_fast") or 32),
            float(scaling.get("beta_slow") or 1),
            scaling.get("mscale"),
            scaling.get("mscale_all_dim"),
            bool(scaling.get("truncate", True)),
        )

    @property
    def attention_factor(self) -> float:
        """By how much queries and keys get longer: 0.1 ln(factor) + 1, the paper's equation 22, if nothing else is
        said."""
        if self.mscale and self.mscale_all_dim:
            return self._length(self.mscale) / self._length(self.mscale_all_dim)
        return self._length(1.0)

    def _length(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def ramp(self, num_dims: int, base: float) -> tuple[float, float]:
        """Return the pairs of dimensions between which the ramp lies, of `num_dims` rotated dimensions."""

        def pair_of(num_turns: float) -> float:  # which makes so many turns over the original positions
            turns = self.original_positions / (num_turns * 2 * math.pi)
            return num_dims * math.log(turns) / (2 * math.log(base))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, num_dims - 1)


def is_yarn(scaling: Mapping[str, object] | None) -> bool:
    """Return whether a config.json's `rope_scaling` has the type yarn."""
    return bool(scaling) and scaling.get("rope_type", scaling.get("type")) == "yarn"  # type: ignore[union-attr]


def check_yarn(scaling: Mapping[str, object], rotary_percent: float) -> None:
    """Refuse YaRN that the engines and the trainers would compute in different ways."""
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        raise ValueError(f"rope_scaling {scaling}: yarn needs a factor of at least 1")
    told = scaling.get("attention_factor")
    is_usual = isinstance(told, float) and math.isclose(told, 0.1 * math.log(factor) + 1.0)  # as OLMo 3 writes it
    if unknown := sorted(scaling.keys() - _KNOWN - ({"attention_factor"} if is_usual else set())):
        raise ValueError(
            f"rope_scaling {scaling}: SGLang and transformers read {', '.join(unknown)} in different ways; leave it out"
        )
    if rotary_percent != 1.0:
        raise ValueError(f"rope_scaling {scaling}: yarn is not supported where only a part of a head is rotated")
