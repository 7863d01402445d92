"""Which engines a push goes to, and which are verified after it."""

from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.config.config import Config
from fusionrl.models.shape import shape_from_hf_config
from fusionrl.plan.plan import Plan
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.runtime import run_actors, weight_sync
from fusionrl.runtime import trainers as trainers_module
from fusionrl.runtime.run_actors import start_all
from fusionrl.runtime.trainers import TrainerGroups
from fusionrl.runtime.weight_sync import WeightSync
from tests.plan.shapes import SMALL
from tests.plan.test_plan import plan as make_plan
from tools.threaded import Threaded

Pushes = Callable[[list[EngineTarget]], dict[str, float]]


class Pushed:
    """As `Push`: calls a function with the targets."""

    def __init__(self, targets: list[EngineTarget], weights: Pushes, adapters: Pushes | None) -> None:
        self.targets, self._weights, self._adapters = targets, weights, adapters

    def from_memory(self, *_: Any) -> dict[str, float]:
        return self._weights(self.targets)

    def of_adapters(self) -> dict[str, float]:
        assert self._adapters is not None
        return self._adapters(self.targets)


def pushing(weights: Pushes, adapters: Pushes | None = None) -> Any:
    return lambda trainers, targets, version, timeout_s: Pushed(targets, weights, adapters)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What a push did: by which transport to which engines, and at which addresses it was verified."""
    found: list[tuple[str, list[int]]] = []

    def note(name: str, targets: list[EngineTarget]) -> dict[str, float]:
        found.append((name, [target.index for target in targets]))
        return {}

    def verification(trainers: Any, targets: list[EngineTarget], urls: list[str], **_: Any) -> Any:
        assert len(targets) == len(urls)
        seen = ("verify", [int(url) for url in urls])
        return SimpleNamespace(compare_tensors=lambda: None, ask_probe=lambda: found.append(seen), judge=dict)

    monkeypatch.setattr(weight_sync, "Push", pushing(lambda targets: note("broadcast", targets)))
    monkeypatch.setattr(Pushed, "by_disk", lambda self, *_, **__: note("disk", self.targets), raising=False)
    monkeypatch.setattr(weight_sync, "Verification", verification)
    return found


def sync_of(
    num_engines: int, engines: dict[str, Any], verify_weights: str = "never", external: Any = None, **plan: Any
) -> WeightSync:
    """The sync of a run with `num_engines` engines of the policy, perhaps more that evaluate."""
    flags = {"verify_weights": verify_weights, "verify_weights_interval": plan.pop("verify_weights_interval", None)}
    pool: Any = SimpleNamespace(
        **{"is_recovering": False, "is_memory_away": False, "left_out_numbers": set()} | engines
    )
    facts = {"transport": "broadcast", "device": "cpu", "knobs": None, "takes_turns": False, "has_pairs": False}
    facts |= {"lora_push": None}
    facts |= {"precision": "fp32", "rollout_dtype": "fp32", "shape": SimpleNamespace(vocab_size=8, vision=None)}
    made: Any = SimpleNamespace(num_engines=num_engines, **{"engines_give_memory": False} | facts | plan)
    trainers: Any = SimpleNamespace(policy=[], plan=made)
    return WeightSync(Config.from_flat(flags), made, Path("run"), trainers, pool, "key", external)


def targets_of(*indices: int) -> list[EngineTarget]:
    return [EngineTarget(index, None, "node", (index,)) for index in indices]


def test_what_a_merged_push_loses_is_measured_and_a_large_share_is_told_once(calls: Any, caplog: Any) -> None:
    """Over the ranks: √(Σ lost² / Σ added²). Without a question to the trainers in fp32."""
    sums = {"0": iter([(0.0, 0.0), (1.0, 16.0), (3.0, 9.0)]), "1": iter([(0.0, 0.0), (0.0, 48.0), (1.0, 7.0)])}
    ranks = [Threaded(SimpleNamespace(merge_losses=lambda own=of_rank: next(own))) for of_rank in sums.values()]
    sync = sync_of(1, {"targets": lambda: targets_of(0)}, lora_push="merged", rollout_dtype="bf16")
    sync._trainers = SimpleNamespace(policy=ranks)
    found = [sync.push(version)["train/lora_merge_loss"] for version in range(3)]
    assert found == [0.0, pytest.approx(1 / 8), pytest.approx(1 / 2)]
    assert caplog.text.count("lose 12 % of what these add") == 1 == caplog.text.count("--lora-push adapter")
    sync = sync_of(1, {"targets": lambda: targets_of(0)}, lora_push="merged")
    assert sync.push(0)["train/lora_merge_loss"] == 0.0
    assert "train/lora_merge_loss" not in sync_of(1, {"targets": lambda: targets_of(0)}).push(0)


def test_an_engine_gets_the_weights_once_and_then_adapters_alone(calls: Any, monkeypatch: Any) -> None:
    """Also one that replaces a dead one, whose push pauses no other."""
    own = {"perf/time_sync_s": 1.0, "sync/prepare_s": 0.5, "sync/pause_s": 0.0, "sync/bytes": 7.0, "sync/calls": 2.0}

    def push_weights(targets: list[EngineTarget]) -> dict[str, float]:
        calls.append(("weights", targets))
        return {"sync/bytes": 100.0}

    def push_adapters(targets: list[EngineTarget]) -> dict[str, float]:
        calls.append(("adapters", [target.index for target in targets]))
        return own

    monkeypatch.setattr(weight_sync, "Push", pushing(push_weights, push_adapters))
    targets = targets_of(0, 1)
    sync = sync_of(2, {"targets": lambda: targets}, lora_push="adapter")
    found = [sync.push(0)["sync/bytes"], sync.push(1)["sync/bytes"]]
    targets = [targets[0], replace(targets[1], num_restarts=1)]
    found.append(sync.push(2)["sync/bytes"])
    assert found == [107.0, 7.0, 107.0]
    assert [name for name, _ in calls] == ["weights", "adapters", "adapters", "weights", "adapters"]
    assert calls[3][1] == [targets[1]] and calls[4][1] == [0, 1]


def test_without_trainers_each_process_of_an_engine_loads_the_folders_once(monkeypatch: Any) -> None:
    """Also one that replaces a dead one, before requests reach it."""
    found: list[object] = []
    monkeypatch.setattr("fusionrl.weights.adapters.folder_files", lambda folder, *_: folder)
    monkeypatch.setattr("fusionrl.weights.adapters.send_files", lambda *sent: found.append(sent[:3]))
    targets = targets_of(0, 1)
    engines = {"targets": lambda: targets, "num_out": 1, "finish_starts": lambda: None, "start_left_out": lambda: None}
    engines |= {"admit": lambda: found.append("admit")}
    sync = sync_of(2, engines, lora_push="adapter", layout=None, shape=shape_from_hf_config(SMALL))
    sync._config = Config.from_flat({"lora_rank": 2, "lora_adapters": ["a=x", "b=y"], "mode": "eval"})
    sync._trainers = Mock(**{"__len__": lambda self: 0})
    sync.load_adapters()
    targets = [targets[0], replace(targets[1], num_restarts=1)]
    sync.prepare_round()
    files = {"a": "x", "b": "y"}
    assert found == [(files, targets_of(0, 1), 0), (files, [targets[1]], 0), "admit"]


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


@pytest.mark.parametrize(
    ("flags", "verified"),
    [
        ({"verify_weights": "never"}, []),
        ({"verify_weights": "always"}, [0, 1, 2, 3, 4, 5]),
        ({"verify_weights": "first"}, [0, 2, 3, 5]),
        ({"verify_weights": "first", "verify_weights_interval": 4}, [0, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_the_first_push_to_a_process_or_from_new_trainers_is_verified(calls, flags, verified) -> None:
    """An engine of others joins with push 2, the run's own was restarted before push 3, the trainers before push 5."""
    own, external = targets_of(0, 7)
    targets: dict[str, list[EngineTarget]] = {"own": [own], "external": []}
    engines = {"targets": lambda: targets["own"], "urls": ["0"], "evaluation": SimpleNamespace(urls=[])}
    external_engines: Any = SimpleNamespace(targets=lambda: targets["external"], pushed_urls=[], admit=lambda: None)
    sync = sync_of(1, engines, external=external_engines, **flags)
    found = []
    for version in range(6):
        if version == 2:
            targets["external"], external_engines.pushed_urls = [external], ["7"]
        if version == 3:
            targets["own"] = [replace(own, num_restarts=1)]
        if version == 5:
            sync._trainers.policy[:] = ["another rank"]
        calls.clear()
        sync.push(version)
        found += [version] if "verify" in dict(calls) else []
    assert found == verified


def test_guests_get_requests_once_the_push_has_gone_well_without_those_that_broke_it(monkeypatch: Any) -> None:
    own, good, bad = targets_of(0, 5, 6)
    error, pushed = RuntimeError("engine 6: size mismatch"), list[list[EngineTarget]]()
    guests = Mock(pushed_urls=[])
    guests.targets.side_effect = lambda: [good] if guests.drop_culprits.called else [good, bad]

    def push(targets: list[EngineTarget]) -> dict[str, float]:
        pushed.append(targets)
        assert not guests.admit.called
        if bad in targets:
            raise error
        return {}

    monkeypatch.setattr(weight_sync, "Push", pushing(push))
    sync = sync_of(1, {"targets": lambda: [own]}, external=guests)
    sync.push(3)
    assert pushed == [[own, good, bad], [own, good]] and sync.version == 3
    guests.drop_culprits.assert_called_once_with(error)
    guests.admit.assert_called_once_with()


def test_a_new_engine_that_evaluates_is_waited_for_where_an_evaluation_follows(calls: Any) -> None:
    log: list[str] = []
    engines = RECOVERING | {
        "finish_starts": lambda with_evaluation: log.append(f"start {with_evaluation}"),
        "admit": lambda with_evaluation: log.append(f"admit {with_evaluation}") or 1,
        "targets": lambda: targets_of(0, 1, 2),
    }
    sync = sync_of(2, engines)
    for version, evaluates in enumerate([False, False, True]):
        assert sync.push(version, evaluates)["sync/engines_restarted"] == 1.0
    assert log == ["start True", "admit True", "start False", "admit False", "start True", "admit True"]
    assert [indices for _, indices in calls] == [[0, 1, 2], [0, 1], [0, 1, 2]]


def test_a_push_reaches_and_verifies_the_engines_that_are_not_left_out(calls: Any, monkeypatch: Any) -> None:
    asked: list[list[str]] = []
    check = Mock(**{"judge.return_value": {}})
    monkeypatch.setattr(weight_sync, "Verification", lambda trainers, targets, urls, **_: asked.append(urls) or check)
    evaluation = SimpleNamespace(urls=["c"])
    engines = RECOVERING | {"finish_starts": lambda _: True, "admit": lambda _: 0, "left_out_numbers": {0}}
    engines |= {"targets": lambda: targets_of(1, 2), "urls": ["a", "b"], "evaluation": evaluation}
    sync = sync_of(2, engines, verify_weights="always")
    metrics = [sync.push(version, evaluates) for version, evaluates in enumerate([True, False])]
    assert [row["sync/engines_left_out"] for row in metrics] == [1.0, 1.0]
    assert [indices for _, indices in calls] == [[1, 2], [1]] and asked == [["b", "c"], ["b"]]


def test_a_push_that_fails_is_not_made_again_where_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows who has given back what in the middle of it."""
    push = Mock(side_effect=RuntimeError("an engine is gone"))
    monkeypatch.setattr(weight_sync, "Push", pushing(push))
    engines = RECOVERING | {"finish_starts": lambda with_evaluation: False, "targets": lambda: targets_of(0)}
    guests: Any = SimpleNamespace(targets=lambda: [], drop_culprits=lambda error: push.call_count < 5)
    tries = weight_sync._MAX_PUSHES
    for shares, external, wanted in ((True, guests, 1), (False, guests, 5), (True, None, 1), (False, None, tries)):
        push.reset_mock()
        with pytest.raises(RuntimeError, match="an engine is gone"):
            sync_of(1, engines, external=external, device="cuda", engines_give_memory=shares).push(1)
        assert push.call_count == wanted


# ------ who holds what of a shared device at the start, in a push with its verification, and in a step
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

    start = TrainerGroups.start

    def __init__(self, device: Device) -> None:
        self.device, self.plan = device, device.plan
        self.policy: list[str] = []
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
        launcher = SimpleNamespace(make_trainers=lambda _: groups)
        monkeypatch.setattr(run_actors, "set_up", trainers.setup)
        monkeypatch.setattr(trainers_module, "set_up", trainers.setup)
        buffer = SimpleNamespace(start=lambda: "prepared", setup=lambda endpoints: {"num_too_long": 0})
        monkeypatch.setattr(run_actors, "gather", lambda refs, check: refs)
        monkeypatch.setattr(trainers_module, "gather", lambda refs, check: refs)
        check = SimpleNamespace(
            compare_tensors=lambda: trainers.need("tensors are compared", {WEIGHTS}, {WEIGHTS}),
            ask_probe=lambda: trainers.need("probe", set(), ALL_OF_ENGINE),
            judge=lambda: trainers.need("probe is scored", {WEIGHTS}),
        )
        monkeypatch.setattr(weight_sync, "Verification", lambda *_, **__: check)
        push = pushing(lambda targets: trainers.need("push", {WEIGHTS}, {WEIGHTS}))
        monkeypatch.setattr(weight_sync, "Push", push)
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
