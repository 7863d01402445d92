"""Memory that adapters take next to the layers: what backward reads of them, and an engine's room for versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusionrl.models.families import model_rules
from fusionrl.models.kinds import Attention, Mlp, RankSizes
from fusionrl.models.rules import Rule
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import ADAPTER, IS_A, AdapterSpec, sample_rules
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.memory.states import part_size


def low_bytes(shape: ModelShape, rank: RankSizes, adapters: AdapterSpec, kinds: tuple[Attention, Mlp]) -> float:
    """Bytes a token that a layer of these kinds keeps of A x; x is kept as that of a trained weight is.

    With dropout, each module keeps what is left of x, and the mask.
    """
    pairs = zip(shape.attention, shape.mlp, strict=True)
    layer = next((layer for layer, pair in enumerate(pairs) if pair == kinds), 0)
    kept, modules = 0.0, set[str]()
    for rule in _kept_rules(shape, adapters, layer, rank.modules):
        if IS_A not in rule.megatron:
            continue
        is_expert, columns = rule.expert is not None, rule.split == "columns"
        routed, size = kinds[1].routed(rank), rank.etp if is_expert else rank.tp
        kept += rule.sizes[0] * rank.width * (routed if is_expert else 1 / rank.split if columns else 1.0)
        if adapters.dropout and (module := rule.megatron.partition(ADAPTER)[0]) not in modules:
            modules.add(module)
            mask = rank.width if rank.on_cpu else 1
            tokens = routed if is_expert else 1.0 if columns else 1 / rank.split
            kept += part_size(rule, size) // rule.sizes[0] * tokens * (rank.width + mask)
    return kept


def joined_bytes(
    shape: ModelShape, layout: TrainerLayout, adapters: AdapterSpec, layers: Iterable[int], rank: RankSizes
) -> float:
    """Bytes of the copies that these layers keep for each micro-batch.

    The adapters of a weight that joins several tensors are joined: one A, and one B with zeros where the rows are
    another's (`trainer/lora.py`).
    """
    values, weights = 0, model_rules(shape)
    for layer in layers:
        modules: dict[str, list[Rule]] = {}
        for rule in _kept_rules(shape, adapters, layer, rank.modules):
            if IS_A in rule.megatron:
                modules.setdefault(rule.megatron.partition(ADAPTER)[0], []).append(rule)
        for module, matrices in modules.items():
            weight = weights[f"{module}.weight"]
            if len(weight.hf) == 1:
                continue
            size = layout.tp if weight.expert is None else layout.etp
            count = 1 if weight.expert is None else shape.num_experts // layout.ep
            joined_a = sum(part_size(rule, size) for rule in matrices) if len(matrices) > 1 else 0
            joined_b = part_size(weight, size) // weight.sizes[1] * adapters.rank * len(matrices)
            values += count * (joined_a + joined_b)
    return float(values * rank.width)


def _kept_rules(shape: ModelShape, adapters: AdapterSpec, layer: int, recomputed: frozenset[str]) -> Iterator[Rule]:
    """Yield the rules of a layer's adapters but for those in an MLP that is computed again in backward."""
    is_again = ("moe" if shape.mlp[layer].num_experts else "mlp") in recomputed
    return (rule for rule in sample_rules(shape, adapters)[layer] if not (is_again and ".mlp." in rule.megatron))


def served_bytes(shape: ModelShape, adapters: AdapterSpec, tp: int, width: int) -> float:
    """Bytes of one adapter on one of an engine's `tp` devices."""
    return float(width * sum(part_size(rule, tp) for layer in sample_rules(shape, adapters) for rule in layer))
