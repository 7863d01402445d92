"""Actors: what a launcher gives them and refuses, whose death is told how, and what is written before they end."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.base.environment import FOLDER_VARIABLE, PEERS_VARIABLE
from fusionrl.config.config import Config
from fusionrl.plan.devices import CUMEM, NVLS
from fusionrl.runtime import early_start, launcher
from fusionrl.runtime.actor_process import ProcessSettings
from fusionrl.runtime.launcher import Launcher, actor_environment
from fusionrl.runtime.run_actors import Actors
from fusionrl.runtime.supervisor import ActorRegistry, Member, Terminated
from fusionrl.runtime.watchdog import Stalled
from tests.plan.test_plan import plan


@pytest.mark.parametrize(
    ("values", "has_settings"),
    [
        ({"rollout_num_gpus": 1}, True),
        ({"rollout_num_gpus": 1, "update_weight_transport": "disk"}, False),
        ({"colocate": True}, False),  # the two sides are in no group, and NCCL's buffers can be given away
        ({"debug_train_only": True}, False),
    ],
)
def test_settings_of_nccl(values, has_settings):
    made = plan("cuda", **values)
    env = actor_environment(made, {}, {CUMEM: "1"}, stores=None, peers=["10.0.0.1", "10.0.0.2"])
    assert {name: env[name] for name in (CUMEM, NVLS) if name in env} == (
        {CUMEM: "1", NVLS: "0"} if has_settings else {}
    )
    assert not any(name.endswith("_SOCKET_IFNAME") for name in env), "each node has its own interfaces"
    assert env[PEERS_VARIABLE] == "10.0.0.1,10.0.0.2" and env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_on_a_cpu(tmp_path: Path):
    env = actor_environment(plan(rollout_num_gpus=1), {}, {}, stores=tmp_path, peers=[])
    assert env["CUDA_VISIBLE_DEVICES"] == "" and env[FOLDER_VARIABLE] == str(tmp_path)
    assert CUMEM not in env and PEERS_VARIABLE not in env


@pytest.mark.parametrize(("num_looks", "gone", "known"), [(3, set(), set()), (100, {1}, set()), (100, {1}, {1, 2})])
def test_other_devices_are_waited_for(
    num_looks: int, gone: set[int], known: set[int], tmp_path: Path, monkeypatch: Any
) -> None:
    """After a node has died Ray takes a moment to give some, or has none."""
    looks, clock = 0, [0.0]

    def places(*_: object) -> list[Any]:
        nonlocal looks
        looks += 1
        return [SimpleNamespace(index=0, node_id="a"), SimpleNamespace(index=1, node_id="bc"[looks >= num_looks])]

    monkeypatch.setattr(launcher, "places_now", places)
    monkeypatch.setattr(launcher.ray, "nodes", lambda: [{"NodeID": node, "Alive": node != "b"} for node in "abc"])
    time = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: clock.append(clock.pop() + s))
    monkeypatch.setattr(launcher, "time", time)
    finding = Launcher(Config(), plan(rollout_num_gpus=1), tmp_path, 1, Mock())
    finding._group = Mock()
    assert finding.find_places(known) == gone
    assert looks == num_looks or (clock[0] > 5) == (not known)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_router_without_a_key_is_for_one_machine_alone(is_alone: bool, tmp_path: Path, monkeypatch: Any) -> None:
    begun: Any = SimpleNamespace(folder=tmp_path, begin=lambda *_: None, environment=dict)
    monkeypatch.setattr(launcher, "start_ray", lambda *_, **__: True)
    monkeypatch.setattr(launcher, "is_alone", lambda: is_alone)
    monkeypatch.setattr(launcher, "place_devices", lambda *_, **__: (None, []))
    config = Config.from_flat({"router_api_key": "none", "ray_address": "10.0.0.1:6379"})
    starting = Launcher(config, plan(rollout_num_gpus=1), tmp_path, 1, begun)
    if is_alone:
        starting.start()
        return
    with pytest.raises(ValueError, match="--router-api-key none: on several nodes"):
        starting.start()


@pytest.fixture
def few_files() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield min(before[1], 1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_driver_and_an_actor_raise_their_limits(few_files: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(early_start, "make_private_folder", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Launcher(Config(), plan(rollout_num_gpus=1), tmp_path, 1).start()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ProcessSettings(0o022).apply()  # of a cluster that the run has joined
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == few_files


# ---------------------------------------------------------------------------------------- the registry
@pytest.mark.parametrize("kills", ["", "the kernel has killed a process"])
def test_an_actor_that_the_kernel_killed(kills: str, tmp_path: Path) -> None:
    """Ray and the counter are fakes: a real kill is in tests/engines/test_process.py."""
    registry, actor = ActorRegistry(), SimpleNamespace()
    untyped: Any = registry
    untyped._memory_kills = SimpleNamespace(sentence=lambda: kills)
    untyped._dead = lambda error, among: [
        (Member("trainer rank 3", actor, tmp_path / "x.log"), "its process 4711 ended", None)
    ]
    said = str(registry.explain(OSError("Connection closed")))
    assert said.startswith("trainer rank 3 died: its process 4711 ended. ")
    assert ("the kernel has killed" in said) == bool(kills)


def test_members_may_be_added_while_they_are_counted(tmp_path: Path) -> None:
    registry: Any = ActorRegistry()
    registry.add("engine 0", None, tmp_path)
    for _ in registry:
        registry.add("engine 1", None, tmp_path)
    assert [member.name for member in registry] == ["engine 0", "engine 1"]


# --------------------------------------------------------------------------------------------- the end
def test_ranks_that_the_watchdog_ended_are_not_the_cause_of_a_stall() -> None:
    actors: Any = object.__new__(Actors)
    actors._in_process, actors.engines = False, Mock()
    actors._launcher = Mock(is_running=True)
    assert actors._find_death(Stalled("the ranks wait in different collectives")) is None
    assert actors._find_death(RuntimeError("closed")) is actors._launcher.registry.explain.return_value


@pytest.mark.parametrize(
    ("error", "is_written"),
    [(None, True), (Terminated("SIGTERM"), True), (KeyboardInterrupt(), False), (RuntimeError("a rank died"), False)],
)
@pytest.mark.parametrize("breaks", [False, True])
def test_a_profile_is_written_before_the_processes_end(error, is_written, breaks, monkeypatch) -> None:
    actors: Any = object.__new__(Actors)
    calls = Mock(**{"ended_by.return_value": None, "profile.side_effect": OSError("full") if breaks else None})
    actors._watchdog = SimpleNamespace(ended_by=calls.ended_by, __exit__=calls.watchdog)
    actors.profiling = SimpleNamespace(close=calls.profile)
    actors._launcher = Mock()
    monkeypatch.setattr(actors, "_find_death", lambda error: None)
    monkeypatch.setattr(actors, "close", calls.processes)
    with pytest.raises(OSError, match="full") if breaks and is_written else contextlib.nullcontext():
        actors._end(error)
    names = [name for name, *_ in calls.mock_calls if name != "ended_by"]
    assert names == ["watchdog", *["profile"] * is_written, "processes"]
