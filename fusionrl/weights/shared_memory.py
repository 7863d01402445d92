"""The executor `ipc` on a CPU: a bucket is written into shared memory once, and all engines of the node copy it out.

An engine on another node gets the bytes by value, in the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusionrl.engines.payload import SharedBuffer, by_value
from fusionrl.engines.spec import LOADER
from fusionrl.plan.push import EngineTarget, own_experts
from fusionrl.weights.gather import Parts
from fusionrl.weights.remote_calls import wait_all


def send_shared(
    parts: Parts,
    buffer: SharedBuffer,
    targets: Sequence[tuple[EngineTarget, Mapping[str, object]]],
    node_id: str,
    num_experts: int,
    timeout_s: float,
) -> int:
    """Let `targets` load `parts`, (of which tensor, name, view of `buffer`); return when they have copied all.

    Each target comes with the other fields of its request (`remote_calls.stamp_of`).

    Returns the number of calls. If an engine divides the experts, each rank gets only its own.

    Raises:
        RuntimeError: an engine refused or died; names it.
    """
    calls = []
    for target, stamp in targets:
        payload_of, load_format = (buffer.payload, LOADER) if target.node_id == node_id else (by_value, None)
        payloads = []
        for rank in range(target.tp_size):
            own_parts = [(name, view) for tensor, name, view in parts if own_experts(tensor, target, rank, num_experts)]
            payloads.append(payload_of(own_parts))
        call = target.handle.update_weights_from_tensor.remote(payloads, load_format=load_format, **stamp)
        calls.append((f"engine {target.index}", call))
    wait_all(calls, timeout_s)
    return len(calls)
