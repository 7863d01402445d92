"""Who holds what of a shared device, at the start, in a push with its verification, and in a step.

The driver's code is real; engines and trainers only keep account of a device's memory.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.config.config import Config
from fusionrl.plan.plan import Plan
from fusionrl.plan.push import EngineTarget
from fusionrl.runtime import run_actors, weight_sync
from fusionrl.runtime.run_actors import start_all
from fusionrl.runtime.weight_sync import WeightSync
from tests.plan.test_plan import plan as make_plan

# Caches are an engine's KV cache and CUDA graphs, states a trainer's gradients and optimizer.
WEIGHTS, CACHES, STATES = "weights", "caches", "states"
ALL_OF_ENGINE, ALL_OF_TRAINER = frozenset({WEIGHTS, CACHES}), frozenset({WEIGHTS, STATES})


class Device:
    """What each side holds; `now` notes it for a moment that needs memory, of which one side may have more than weights
    only where the other has nothing, if they give their memory away for each other."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.engine: set[str] = set()
        self.trainer: set[str] = set()
        self.log: list[tuple[str, str, str]] = []

    def now(self, name: str) -> None:
        self.log.append((name, "+".join(sorted(self.engine)), "+".join(sorted(self.trainer))))
        if self.plan.engines_give_memory and self.engine and self.trainer:
            assert self.engine == self.trainer == {WEIGHTS}, self.log


class Engines:
    """As `EnginePool`: one engine."""

    is_recovering, is_memory_away, num_out = False, False, 0
    urls: tuple[str, ...] = ("0",)
    evaluation = SimpleNamespace(urls=[])

    def __init__(self, device: Device) -> None:
        self.device = device

    def start(self) -> None:
        self.device.engine |= ALL_OF_ENGINE
        self.device.now("engines start")

    def finish_start(self) -> str:
        return "addresses"

    def targets(self) -> list[EngineTarget]:
        return [EngineTarget(0, None, "node", (0,))]

    def release_memory(self, tags: list[str] | None = None) -> None:
        if self.device.plan.engines_give_memory and not self.is_memory_away:
            self.device.engine -= ALL_OF_ENGINE if tags is None else {CACHES}
            self.is_memory_away = True

    def resume_memory(self, tags: list[str], *, is_last: bool) -> None:
        self.device.engine |= {WEIGHTS} if tags == ["weights"] else {CACHES}
        self.is_memory_away = not is_last
        self.device.now("engines take " + "+".join(tags))


class Trainers:
    """As `TrainerGroups`: a group or two on the same device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.actors: list[str] = []
        self.auxiliaries: list[str] = []

    def setup(self, groups: list[list[str]]) -> list[str]:
        for group in groups:
            self.device.trainer |= ALL_OF_TRAINER
            self.device.now(f"{group[0]} starts")
        return [name for group in groups for name in group]

    def offload(self, keep_weights: bool = False) -> None:
        if self.device.plan.trainers_give_memory:
            self.device.trainer &= {WEIGHTS} if keep_weights else set()

    def make_room(self, group: list[str]) -> None:
        self.device.now(f"{group[0]} makes room")
        self.device.trainer.clear()

    def need(self, name: str, parts: set[str], of_engine: Set[str] = frozenset()) -> dict[str, float]:
        """They take back what they need by themselves, where an engine has what it needs."""
        assert of_engine <= self.device.engine
        self.device.trainer |= parts
        self.device.now(name)
        return {}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start, and push twice with every verification; between the pushes a rollout and training."""

    def go(plan: Plan) -> list[tuple[str, str, str]]:
        device = Device(plan)
        engines, trainers = Engines(device), Trainers(device)
        groups = (["policy"], ["critic"] if plan.auxiliary else [])
        launcher = SimpleNamespace(make_trainers=lambda: groups, make_buffer=lambda: "buffer")
        launcher.setup_trainers = trainers.setup
        buffer = SimpleNamespace(start=lambda actor: "prepared", setup=lambda endpoints: {"num_too_long": 0})
        monkeypatch.setattr(run_actors, "gather", lambda refs, check: refs)
        check = SimpleNamespace(
            compare_tensors=lambda: trainers.need("tensors are compared", {WEIGHTS}, {WEIGHTS}),
            ask_probe=lambda: trainers.need("probe", set(), ALL_OF_ENGINE),
            judge=lambda: trainers.need("probe is scored", {WEIGHTS}),
        )
        monkeypatch.setattr(weight_sync, "Verification", lambda *_, **__: check)
        monkeypatch.setattr(weight_sync, "push_weights", lambda *_, **__: trainers.need("push", {WEIGHTS}, {WEIGHTS}))
        parts: Any = (launcher, engines, trainers, buffer)
        assert start_all(plan, *parts, lambda: None) == {"num_too_long": 0}
        both: Any = (trainers, engines)
        sync = WeightSync(Config.from_flat({"verify_weights": "always"}), plan, Path("run"), *both, "key")
        sync.push(0)
        for version in (1, 2):
            assert device.engine == ALL_OF_ENGINE
            trainers.offload()
            device.now("generation")
            engines.release_memory()
            trainers.need("training", ALL_OF_TRAINER)
            sync.push(version)
        return device.log

    return go


PUSH = [
    ("engines take weights", "weights", "weights"),
    ("push", "weights", "weights"),
    ("tensors are compared", "weights", "weights"),
    ("engines take kv_cache+cuda_graph", "caches+weights", ""),
    ("probe", "caches+weights", ""),
    ("probe is scored", "weights", "weights"),
    ("engines take kv_cache+cuda_graph", "caches+weights", ""),
]
STEP = [("generation", "caches+weights", ""), ("training", "", "states+weights")]


def test_each_side_is_alone_when_it_needs_the_device(run: Any) -> None:
    """Before, trainers loaded while engines sized their caches, and at the first push and its check both were whole."""
    log = run(make_plan("cuda", colocate=True))
    assert log[:2] == [("engines start", "caches+weights", ""), ("policy starts", "", "states+weights")]
    assert log[2:] == PUSH + 2 * (STEP + PUSH)


def test_a_critic_on_the_same_device_starts_after_the_policy(run: Any) -> None:
    made = make_plan("cuda", colocate=True, advantage_estimator="ppo")
    assert made.shares_with_auxiliary
    log = run(made)
    assert [name for name, _, _ in log[:4]] == ["engines start", "policy starts", "policy makes room", "critic starts"]


def test_engines_that_keep_their_memory_start_in_what_is_left(run: Any) -> None:
    log = run(make_plan("cuda", colocate=True, offload_rollout=False))
    assert log[:2] == [("policy starts", "", "states+weights"), ("engines start", "caches+weights", "")]
    assert ("push", "caches+weights", "weights") in log
    log = run(make_plan("cuda", colocate=True, offload_rollout=False, offload_train="never"))
    assert log[1] == ("engines start", "caches+weights", "states+weights")


@pytest.mark.parametrize(
    ("device", "values", "order"),
    [
        ("cuda", {"colocate": True}, "engines first"),
        ("cuda", {"colocate": True, "offload_rollout": False}, "trainers first"),
        ("cuda", {"rollout_num_gpus": 1}, "together"),
        ("cpu", {"colocate": True}, "together"),
        ("cuda", {"mode": "sft"}, "together"),
        ("cuda", {"debug_rollout_only": True, "colocate": True}, "together"),
    ],
)
def test_orders(device: Any, values: dict[str, Any], order: str) -> None:
    assert make_plan(device, **values).start_order == order
