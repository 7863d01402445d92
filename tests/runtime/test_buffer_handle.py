"""The driver's end of the Buffer: health checks of the policy's engines while others evaluate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fusionrl.buffer.evaluation import MixedVersions
from fusionrl.config.user_code import HookError
from fusionrl.runtime.buffer_handle import BufferHandle, EvaluationLost, PendingRound


@pytest.mark.parametrize("has_own", [True, False])
def test_an_old_health_check_is_not_read_while_others_evaluate(has_own: bool) -> None:
    """One that was begun before the last push may have met an engine that stood still."""
    log: list[str] = []
    engines: Any = SimpleNamespace(
        evaluation=SimpleNamespace(engines=["own"] if has_own else [], router=None, count_faults=dict),
        router=None,
        begin_round=lambda: log.append("begin round"),
        count_faults=dict,
    )
    supervisor: Any = SimpleNamespace(wait=lambda ref: log.append("wait") or {"eval/x/reward": 1.0})
    started = PendingRound(ref=None, faults={})  # type: ignore[arg-type]
    assert BufferHandle(engines, supervisor).wait_evaluation(started) == {"eval/x/reward": 1.0}
    assert log == (["begin round", "wait"] if has_own else ["wait"])


class Died:
    """Engines of their own, of which some die before the wait for the evaluation ends."""

    def __init__(self, num_died: int, error: Exception | None) -> None:
        self.total = 4
        self.evaluation = SimpleNamespace(engines=["own"], router=None, count_faults=self.count)
        self.router, self._num_died, self._error = None, num_died, error

    def begin_round(self) -> None: ...

    def count(self) -> dict[str, float]:
        return {"engines_died": float(self.total)}

    def wait(self, ref: Any) -> dict[str, float]:
        self.total += self._num_died
        if self._error is not None:
            raise ray.exceptions.RayTaskError("evaluate", "traceback", self._error)
        return {"eval/x/reward": 1.0}


@pytest.mark.parametrize(
    ("num_died", "error", "raises"),
    [
        (1, RuntimeError("no engine\n  File …"), EvaluationLost),
        (0, RuntimeError("no engine"), ray.exceptions.RayTaskError),  # of something else
        (1, MixedVersions("two versions"), ray.exceptions.RayTaskError),  # never without a word
        (1, ValueError("--eval-config: no such set"), ray.exceptions.RayTaskError),  # another engine would not help
        (1, HookError("--custom-rm-path f: KeyError: 'x'"), ray.exceptions.RayTaskError),
        (1, HookError("no engine", is_own_fault=False), EvaluationLost),  # of a function that asks on its own
        (1, None, None),  # another engine has taken over
    ],
)
def test_an_evaluation_whose_engines_die(num_died: int, error: Exception | None, raises: Any) -> None:
    engines: Any = Died(num_died, error)
    handle = BufferHandle(engines, engines)
    started = PendingRound(ref=None, faults=engines.count())  # type: ignore[arg-type]
    if raises is None:
        assert handle.wait_evaluation(started) == {"eval/x/reward": 1.0, "eval/engines_died": 1.0}
        return
    with pytest.raises(raises) as caught:
        handle.wait_evaluation(started)
    if raises is EvaluationLost:
        assert str(caught.value) == "1 of its engines died: no engine"
