"""The driver's end of the Buffer: health checks of the policy's engines while others evaluate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.cluster.buffer_handle import BufferHandle, Started


@pytest.mark.parametrize("has_own", [True, False])
def test_an_old_health_check_is_not_read_while_others_evaluate(has_own: bool) -> None:
    """One that was begun before the last push may have met an engine that stood still."""
    log: list[str] = []
    engines: Any = SimpleNamespace(
        evaluation=SimpleNamespace(engines=["own"] if has_own else [], refusals=None),
        refusals=None,
        begin_round=lambda: log.append("begin round"),
        count_faults=dict,
    )
    supervisor: Any = SimpleNamespace(wait=lambda ref: log.append("wait") or {"eval/x/reward": 1.0})
    started = Started(ref=None, faults={})  # type: ignore[arg-type]
    assert BufferHandle(engines, supervisor).wait_evaluation(started) == {"eval/x/reward": 1.0}
    assert log == (["begin round", "wait"] if has_own else ["wait"])
