"""Which engines a push goes to, and which are verified after it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.cluster import weight_sync
from fusionrl.cluster.weight_sync import WeightSync
from fusionrl.config.config import Config
from fusionrl.plan.push import EngineTarget


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What a push did: by which transport to which engines, and at which addresses it was verified."""
    found: list[tuple[str, list[int]]] = []

    def transfer(name: str) -> Any:
        def push(trainers: Any, targets: list[EngineTarget], *_: Any, **__: Any) -> dict[str, float]:
            found.append((name, [target.index for target in targets]))
            return {}

        return push

    def verify(trainers: Any, targets: list[EngineTarget], urls: list[str], **_: Any) -> dict[str, float]:
        assert len(targets) == len(urls)
        found.append(("verify", [int(url) for url in urls]))
        return {}

    monkeypatch.setattr(weight_sync, "push_weights", transfer("broadcast"))
    monkeypatch.setattr(weight_sync, "push_by_disk", transfer("disk"))
    monkeypatch.setattr(weight_sync, "verify_push", verify)
    return found


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_engines_that_evaluate_get_the_first_push_and_those_before_an_evaluation(
    calls: list[tuple[str, list[int]]], transport: str
) -> None:
    targets = [EngineTarget(index, None, "node", (index,)) for index in range(3)]
    engines: Any = SimpleNamespace(
        is_recovering=False,
        is_memory_away=False,
        targets=lambda: targets,
        urls=["0", "1"],
        evaluation=SimpleNamespace(urls=["2"]),
    )
    plan: Any = SimpleNamespace(num_engines=2, transport=transport, device="cpu", knobs=None)
    plan.precision = plan.rollout_dtype = "fp32"
    plan.shape = SimpleNamespace(vocab_size=8)
    config = Config.from_flat({"verify_weights": "always"})
    trainers: Any = SimpleNamespace(actors=[])
    sync = WeightSync(config, plan, Path("run"), trainers, engines, "key")
    for version, evaluates in enumerate([False, False, True, False]):
        sync.push(version, evaluates)
    both = [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1]]
    assert [indices for name, indices in calls if name == transport] == both
    assert [indices for name, indices in calls if name == "verify"] == both
