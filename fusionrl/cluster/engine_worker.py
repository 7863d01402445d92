"""An engine's actor process; apart from the others', so that it imports nothing of the Buffer and the trainers."""

from __future__ import annotations

from fusionrl.cluster.actor_process import Settled, log_to
from fusionrl.engines.engine import EngineActor, EngineSpec


class EngineWorker(EngineActor):
    """An engine's actor process."""

    def __init__(self, spec: EngineSpec, log: str, settled: Settled | None = None) -> None:
        if settled is not None:
            settled.apply()
        log_to(log, f"{spec.role}-{spec.index}")
        super().__init__(spec)
