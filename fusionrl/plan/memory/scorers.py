"""Memory of the engines that only read: a reward model's and a teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fusionrl.plan.devices import Machine
from fusionrl.plan.memory.engine import EngineMemory, engine_memory
from fusionrl.plan.push import push_tensors, torch_name
from fusionrl.plan.scorers import ScorerPlan, ScorerRole


@dataclass(frozen=True)
class ScorerMemory:
    """One device of an engine that only reads.

    role     whose it is
    bundles  devices of all engines of the role
    engine   None: not estimated
    unknown  the reason why not; empty where the devices' memory is not known
    """

    role: ScorerRole
    bundles: tuple[int, ...]
    engine: EngineMemory | None
    unknown: str = ""

    @property
    def name(self) -> str:
        return self.role.replace("-", " ")


def scorer_memory(
    scorer: ScorerPlan, dtype: Literal["fp32", "bf16"], machine: Machine | None, *, on_cpu: bool
) -> ScorerMemory:
    """The estimate for the engines of a reward model or a teacher. `dtype` is that of all engines."""
    bundles = tuple(bundle for engine in scorer.bundles for bundle in engine)
    if scorer.shape is None:
        return ScorerMemory(scorer.role, bundles, None, scorer.unknown)
    tensors = push_tensors(scorer.shape, lambda _: 0, torch_name(dtype), scorer.quantization)
    engine = engine_memory(
        scorer.shape,
        float(sum(tensor.sent_bytes for tensor in tensors)),
        scorer.size,
        dtype,
        scorer.server_args,
        device_memory=machine.device_memory if machine is not None else None,
        on_cpu=on_cpu,
    )
    return ScorerMemory(scorer.role, bundles, engine)


def node_bytes(scorers: Sequence[ScorerMemory], node: int, per_node: int) -> tuple[float, float, int]:
    """(bytes of weights, bytes of KV caches, devices) on one node of `per_node` devices."""
    weights = caches = 0.0
    count = 0
    for scorer in scorers:
        here = sum(bundle // per_node == node for bundle in scorer.bundles)
        count += here
        if scorer.engine is not None:
            weights, caches = weights + here * scorer.engine.weights, caches + here * scorer.engine.pool
    return weights, caches, count
