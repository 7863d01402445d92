"""What the controller's state looks like when a batch is taken, for metrics.jsonl."""

from __future__ import annotations

from fusionrl.pipeline.decide import base_limit
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import State


def state_numbers(state: State, knobs: Knobs) -> dict[str, float]:
    """Return the numbers of a state whose next fetch has begun.

    Credits are the groups that may be admitted and not yet be fetched: by the bound, the lead and spare groups.
    """
    fetched = state.num_fetched * knobs.groups_per_fetch
    return {
        "pipeline/in_flight": float(state.samples_in_flight),
        "pipeline/running": float(len(state.of("running"))),
        "pipeline/ready": float(len(state.of("ready"))),
        "pipeline/parked": float(sum(group.has_tokens for group in state.of("pending"))),
        "pipeline/admitted": float(state.committed),
        "pipeline/credits": float(max(0, base_limit(state, knobs) + knobs.spare_groups - fetched)),
        "pipeline/credits_used": float(max(0, state.committed - fetched)),
    }
