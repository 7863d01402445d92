"""What follows from --lora-rank: the adapters of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fusionrl.config.config import Config
from fusionrl.config.run_parts import uses_engines, uses_trainers
from fusionrl.models.adapters import AdapterSpec, checked_spec, sample_rules
from fusionrl.models.families import get_family
from fusionrl.models.kinds import Delta
from fusionrl.models.shape import ModelShape

AdapterPush = Literal["adapter", "merged"]


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


def adapter_push(config: Config, shape: ModelShape) -> tuple[AdapterPush, str] | None:
    """Return what engines get of a run with adapters, and why in words; None: no adapters, or no push.

    Raises:
        ValueError: --lora-push adapter, which these engines cannot take.
    """
    spec = adapters_of(config, shape)
    if spec is None or not (uses_trainers(config) and uses_engines(config)):
        return None
    if config.lora.lora_push == "merged":
        return "merged", "--lora-push merged"
    reason = next(_merge_reasons(config, shape, spec), None)
    if reason is None:
        return "adapter", "engines add it to each product, and no request waits for a push"
    if config.lora.lora_push == "adapter":
        raise ValueError(f"--lora-push adapter: {reason}; give --lora-push merged or leave the flag out")
    return "merged", reason


def _merge_reasons(config: Config, shape: ModelShape, spec: AdapterSpec) -> Iterator[str]:
    """Yield why engines cannot take adapters under a name."""
    if config.cluster.rollout_external_engine_addrs:
        yield "engines that others have started do not know names of versions"
    if not get_family(shape.model_type).engines_join:
        yield f"engines run transformers' own {shape.model_type}, which takes no adapters"
    if any(isinstance(kind, Delta) for kind in shape.attention):
        yield "engines take no adapters on all projections of gated delta nets"
    if any(rule.expert is not None for layer in sample_rules(shape, spec) for rule in layer):
        yield "engines take no adapters on experts (--exclude-modules, or --target-modules without them)"
