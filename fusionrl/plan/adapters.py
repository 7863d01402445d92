"""What follows from --lora-rank: the adapters of a run. Pure."""

from __future__ import annotations

from fusionrl.config.config import Config
from fusionrl.models.adapters import AdapterSpec, checked_spec
from fusionrl.models.shape import ModelShape


def adapters_of(config: Config, shape: ModelShape) -> AdapterSpec | None:
    """Return the adapters that are trained; None: the weights are.

    Raises ValueError as `checked_spec`.
    """
    lora = config.lora
    if not lora.lora_rank:
        return None
    spec = AdapterSpec(
        rank=lora.lora_rank,
        alpha=lora.lora_alpha,
        use_rslora=lora.lora_use_rslora,
        dropout=lora.lora_dropout,
        targets=tuple(lora.target_modules),
        excluded=tuple(lora.exclude_modules),
    )
    return checked_spec(spec, shape)
