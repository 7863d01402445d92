"""Which engines a push goes to, and which are verified after it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.config.config import Config
from fusionrl.plan.push import EngineTarget
from fusionrl.runtime import weight_sync
from fusionrl.runtime.weight_sync import WeightSync


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What a push did: by which transport to which engines, and at which addresses it was verified."""
    found: list[tuple[str, list[int]]] = []

    def transfer(name: str) -> Any:
        def push(trainers: Any, targets: list[EngineTarget], *_: Any, **__: Any) -> dict[str, float]:
            found.append((name, [target.index for target in targets]))
            return {}

        return push

    def verification(trainers: Any, targets: list[EngineTarget], urls: list[str], **_: Any) -> Any:
        assert len(targets) == len(urls)
        seen = ("verify", [int(url) for url in urls])
        return SimpleNamespace(compare_tensors=lambda: None, ask_probe=lambda: found.append(seen), judge=dict)

    monkeypatch.setattr(weight_sync, "push_weights", transfer("broadcast"))
    monkeypatch.setattr(weight_sync, "push_by_disk", transfer("disk"))
    monkeypatch.setattr(weight_sync, "Verification", verification)
    return found


def sync_of(
    num_engines: int, engines: dict[str, Any], when: str = "never", external: Any = None, **plan: Any
) -> WeightSync:
    """The sync of a run with `num_engines` engines of the policy, perhaps more that evaluate."""
    pool: Any = SimpleNamespace(**{"is_recovering": False, "is_memory_away": False} | engines)
    facts = {"transport": "broadcast", "device": "cpu", "knobs": None, "takes_turns": False, "has_pairs": False}
    facts |= {"precision": "fp32", "rollout_dtype": "fp32", "shape": SimpleNamespace(vocab_size=8)}
    made: Any = SimpleNamespace(num_engines=num_engines, **{"engines_give_memory": False} | facts | plan)
    trainers: Any = SimpleNamespace(actors=[])
    return WeightSync(Config.from_flat({"verify_weights": when}), made, Path("run"), trainers, pool, "key", external)


def targets_of(*indices: int) -> list[EngineTarget]:
    return [EngineTarget(index, None, "node", (index,)) for index in indices]


RECOVERING: dict[str, Any] = {
    "is_recovering": True,
    "check": lambda is_generating: None,
    "check_answers": lambda with_evaluation, makes_tokens=False: 1,
}


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_engines_that_evaluate_get_the_first_push_and_those_before_an_evaluation(calls, transport) -> None:
    engines = {"targets": lambda: targets_of(0, 1, 2), "urls": ["0", "1"], "evaluation": SimpleNamespace(urls=["2"])}
    sync = sync_of(2, engines, "always", transport=transport)
    for version, evaluates in enumerate([False, False, True, False]):
        sync.push(version, evaluates)
    both = [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1]]
    assert [indices for name, indices in calls if name == transport] == both
    assert [indices for name, indices in calls if name == "verify"] == both


@pytest.mark.parametrize(("when", "verified"), [("first", [0, 2]), ("never", []), ("always", [0, 1, 2])])
def test_the_first_push_of_an_engine_of_others_is_verified_as_the_runs_first_is(calls, when, verified) -> None:
    engines = {"targets": lambda: targets_of(0), "urls": ["0"], "evaluation": SimpleNamespace(urls=[])}
    external_engines: Any = SimpleNamespace(has_new=False, targets=lambda: [], pushed_urls=[], admit=lambda: None)
    sync = sync_of(1, engines, when, external_engines)
    found = []
    for version in range(3):
        external_engines.has_new = version == 2
        calls.clear()
        sync.push(version)
        found += [version] if "verify" in dict(calls) else []
    assert found == verified


def test_guests_get_requests_once_the_push_has_gone_well_without_those_that_broke_it(monkeypatch: Any) -> None:
    own, good, bad = targets_of(0, 5, 6)
    error, pushed = RuntimeError("engine 6: size mismatch"), list[list[EngineTarget]]()
    guests = Mock(has_new=True, pushed_urls=[])
    guests.targets.side_effect = lambda: [good] if guests.drop_culprits.called else [good, bad]

    def push(trainers: Any, targets: list[EngineTarget], *_: Any, **__: Any) -> dict[str, float]:
        pushed.append(targets)
        assert not guests.admit.called
        if bad in targets:
            raise error
        return {}

    monkeypatch.setattr(weight_sync, "push_weights", push)
    sync = sync_of(1, {"targets": lambda: [own]}, external=guests)
    sync.push(3)
    assert pushed == [[own, good, bad], [own, good]] and sync.version == 3
    guests.drop_culprits.assert_called_once_with(error)
    guests.admit.assert_called_once_with()


def test_a_new_engine_that_evaluates_is_waited_for_where_an_evaluation_follows(calls: Any) -> None:
    log: list[str] = []
    engines = RECOVERING | {
        "finish_starts": lambda with_evaluation: log.append(f"start {with_evaluation}"),
        "join": lambda with_evaluation: log.append(f"join {with_evaluation}") or 1,
        "targets": lambda: targets_of(0, 1, 2),
    }
    sync = sync_of(2, engines)
    for version, evaluates in enumerate([False, False, True]):
        assert sync.push(version, evaluates)["sync/engines_restarted"] == 1.0
    assert log == ["start True", "join True", "start False", "join False", "start True", "join True"]
    assert [indices for _, indices in calls] == [[0, 1, 2], [0, 1], [0, 1, 2]]


def test_a_push_that_fails_is_not_made_again_where_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows who has given back what in the middle of it."""
    push = Mock(side_effect=RuntimeError("an engine is gone"))
    monkeypatch.setattr(weight_sync, "push_weights", push)
    engines = RECOVERING | {"finish_starts": lambda with_evaluation: False, "targets": lambda: targets_of(0)}
    guests: Any = SimpleNamespace(has_new=False, targets=lambda: [], drop_culprits=lambda error: push.call_count < 5)
    tries = weight_sync._MAX_PUSHES
    for shares, external, wanted in ((True, guests, 1), (False, guests, 5), (True, None, 1), (False, None, tries)):
        push.reset_mock()
        with pytest.raises(RuntimeError, match="an engine is gone"):
            sync_of(1, engines, external=external, device="cuda", engines_give_memory=shares).push(1)
        assert push.call_count == wanted
