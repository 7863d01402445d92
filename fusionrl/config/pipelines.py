"""The pipelines (--pipeline): how generation and training overlap. The driver has a loop for each available one."""

from __future__ import annotations

from fusionrl.pipeline.knobs import PIPELINES

AVAILABLE = tuple(PIPELINES)
# The loop of one rollout after the other, without a controller.
IN_TURN = "on-policy"
