"""An engine that only evaluates dies: what the pool of engines does. Ray is real, engines and routers are not."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from fusionrl.config.config import Config
from fusionrl.engines.external_engine import ExternalEngineFacts
from fusionrl.observe.run_dir import WANTED, add_wanted, read_states, remove_wanted
from fusionrl.runtime import external_engines, routed_engines
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.external_engines import ExternalEngines
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.routed_engines import MAX_STARTS, NoDevice
from fusionrl.runtime.supervisor import ActorRegistry
from tests.own_process import wait_until
from tests.runtime import fakes
from tests.runtime.fakes import Router


class PoolRouter(fakes.Router):
    """A router that starts without engines."""

    url = "http://router"

    def __init__(self) -> None:
        super().__init__([])

    def start(self) -> str:
        return self.url

    def check_alive(self) -> None: ...

    def find_fault(self) -> None: ...

    def shutdown(self) -> None: ...

    def num_retries(self) -> int:
        return 0


class World(fakes.Processes):
    """Two engines of the policy, engine 2 that evaluates, and their pool."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        super().__init__(folder, 3)
        self.routers: dict[str, PoolRouter] = {}
        self.addresses: list[tuple[list[str], list[str]]] = []
        plan: Any = SimpleNamespace(
            num_engines=2, scorers=(), eval_bundles=((2,),), engines_give_memory=False, takes_turns=False
        )
        plan.all_engine_bundles = ((0,), (1,), (2,))
        plan.group_of, plan.has_pairs = lambda engine: None, False
        bundles = [SimpleNamespace(node_id="node", node_address="10.0.0.1")] * 3
        launcher: Any = SimpleNamespace(make_router=self.make_router, api_key="key", bundles=bundles)
        launcher.make_engine, launcher.end_engine = lambda role, index: self.make(index), ray.kill
        launcher.has_lost_engine = lambda role, index: index in self.lost
        self.lost: list[int] = []  # engines without a node
        self.plan = plan
        self.pool = EnginePool(Config.from_flat(flags), plan, launcher, on_addresses=self.note)
        self.pool.start()

    def note(self) -> None:
        self.addresses.append((self.pool.addresses, self.pool.evaluation.addresses))

    def make_router(self, name: str = "router") -> PoolRouter:
        self.routers[name] = PoolRouter()
        return self.routers[name]


pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("shared_cluster")]


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    def make(**flags: Any) -> World:
        it = World(tmp_path, **flags)
        assert it.pool.finish_start().eval_urls == ("http://2.3",)
        return it

    return make


def test_without_fault_tolerance_it_ends_the_run_by_its_name(world: Any) -> None:
    it = world()
    assert it.pool.check(True) is None
    it.set(2, "dead")
    with pytest.raises(RuntimeError, match="engine 2 was killed"):
        it.pool.check(False)
    found = it.pool.find_dead()
    assert found is not None and "engine 2 was killed" in str(found)


def test_engines_make_way_for_trainers_that_save(world: Any) -> None:
    it = world()
    ended = Path(it.folder).glob
    it.pool.make_way()
    assert not list(ended("*.ended")), "on devices of their own"
    it.pool._plan.engines_give_memory = True
    it.set(1, "dead")
    it.pool.make_way()
    assert sorted(path.name[0] for path in ended("*.ended")) == ["0", "1"], "the one that evaluates has other devices"
    found = it.pool.find_dead()
    assert found is not None and "engine 1 was killed" in str(found), "as it was before they ended"


@pytest.mark.parametrize("is_tolerant", [False, True])
def test_one_that_dies_as_the_router_gets_it_is_found_with_its_log(is_tolerant, tmp_path, monkeypatch) -> None:
    it, add_worker = World(tmp_path, use_fault_tolerance=is_tolerant), PoolRouter.add_worker

    def refuse(router: PoolRouter, url: str, api_key: str | None) -> None:
        add_worker(router, url, api_key)
        if router is it.routers["eval-router"]:
            it.set(2, "dead")
            raise RuntimeError("the router does not take it")

    monkeypatch.setattr(PoolRouter, "add_worker", refuse)
    with pytest.raises(RuntimeError, match="does not take it"):
        it.pool.finish_start()
    found = it.pool.find_dead()
    assert found is not None and "engine 2 was killed" in str(found)


def lose(it: World, engine: int) -> None:
    """Let the node of an engine die, in place of which the cluster has no other."""
    it.lost = [engine]
    it.set(engine, "starts slowly")  # Ray starts no actor without a device
    group = it.pool if engine < 2 else it.pool.evaluation
    group.engines[engine % 2].die.remote()
    wait_until(lambda: it.pool.check(False) or group.num_out == 1)


def test_the_run_goes_on_without_one_whose_node_died_and_takes_it_back(
    world: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(routed_engines, "REPLACED_S", 0.2)
    it = world(use_fault_tolerance=True)
    pool = it.pool
    lose(it, 1)
    assert pool.finish_starts() and pool.admit() == 0
    assert "engine 1: a node of it is dead, and Ray gave no other device within 0 s; the run continues" in caplog.text
    assert it.addresses == [(["http://0.1"], ["http://2.3"])] and it.routers["router"].urls == ["http://0.1"]
    assert [target.index for target in pool.targets()] == [0, 2] and pool.left_out_numbers == {1} and pool.num_out == 0
    assert len(pool.present) == 1 and len(pool.everyone) == 2
    assert all(target.addresses == ("10.0.0.1",) for target in pool.targets())
    pool.check(False)
    pool.check(True)
    assert not pool.finish_starts(), "nothing waits for it"
    it.plan.engines_give_memory = True
    pool.release_memory()
    pool.resume_memory(["weights"], is_last=True)
    it.plan.engines_give_memory = False
    it.lost = []
    it.set(1, "well")
    assert pool.finish_starts() and pool.num_out == 1 and [target.index for target in pool.targets()] == [0, 1, 2]
    assert pool.admit() == 1 and pool.left_out_numbers == set()
    assert len(it.addresses[-1][0]) == 2 and it.addresses[-1][0][1] != "http://1.2"
    assert it.routers["router"].urls == it.addresses[-1][0]


def test_the_last_engine_is_not_left_out(world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(routed_engines, "REPLACED_S", 0.2)
    it = world(use_fault_tolerance=True)
    lose(it, 1)
    assert it.pool.finish_starts() and it.pool.left_out_numbers == {1}
    it.set(0, "dead")
    with pytest.raises(RuntimeError, match="engine 0 was killed"):
        it.pool.check(False)


def test_one_that_starts_meanwhile_stands_in_for_one_without_a_device(world: Any, monkeypatch: Any) -> None:
    """Also one with the lower number, and of engines in pairs one of the same role."""
    monkeypatch.setattr(routed_engines, "REPLACED_S", 0.2)
    it = world(use_fault_tolerance=True, placement_timeout_s=60.0)
    it.plan.has_pairs, it.plan.group_of = True, lambda index: SimpleNamespace(role="decode")
    lose(it, 0)
    it.pool._may_lose_all = True
    it.set(1, "dead")
    wait_until(lambda: it.pool.check(False) or it.pool.num_out == 2)
    it.set(1, "well")
    assert it.pool.wait_for_new() == [1] and it.pool.left_out == {0}


def test_one_whose_new_devices_do_not_fit_stays_left_out(world: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(routed_engines, "REPLACED_S", 0.2)
    it = world(use_fault_tolerance=True)
    lose(it, 1)
    assert it.pool.finish_starts()
    it.lost, make = [], it.pool._launcher.make_engine
    it.pool._launcher.make_engine = Mock(side_effect=ValueError("3 and 1 devices"))
    assert not it.pool.finish_starts() and not it.pool.finish_starts() and it.pool.left_out == {1}
    assert caplog.text.count("engine 1 stays left out: 3 and 1 devices") == 1
    it.pool._launcher.make_engine = make
    it.set(1, "well")
    assert it.pool.finish_starts() and it.pool.admit() == 1


def test_one_is_left_out_where_the_devices_of_another_node_do_not_fit(world: Any, caplog: Any) -> None:
    it = world(use_fault_tolerance=True)
    it.pool._launcher.make_engine = Mock(side_effect=ValueError("3 and 1 devices"))
    it.pool.engines[1].die.remote()
    wait_until(lambda: it.pool.check(False) or it.pool.left_out == {1})
    assert "engine 1: 3 and 1 devices; the run continues with 1 engine" in caplog.text and it.pool.num_out == 0
    assert not it.pool.finish_starts() and it.addresses == [(["http://0.1"], ["http://2.3"])]
    assert not it.pool.finish_starts() and len(it.addresses) == 1


def test_one_that_starts_in_vain_is_left_out_where_other_devices_do_not_fit(world: Any) -> None:
    it = world(use_fault_tolerance=True)
    it.set(1, "fails to start")
    it.pool.engines[1].die.remote()
    wait_until(lambda: it.pool.check(False) or it.pool.num_out == 1)
    it.pool._launcher.make_engine = Mock(side_effect=ValueError("3 and 1 devices"))
    assert it.pool.wait_for_new() == [] and it.pool.left_out == {1} and it.pool.num_out == 0


def test_one_that_has_started_is_not_forgotten_as_another_one_ends_the_wait(world: Any) -> None:
    it = world(use_fault_tolerance=True, placement_timeout_s=0.5)
    it.plan.has_pairs, it.plan.group_of = True, lambda index: SimpleNamespace(role=("prefill", "decode")[index])
    lose(it, 1)
    it.pool._may_lose_all = True
    it.set(0, "dead")
    wait_until(lambda: it.pool.check(False) or it.pool.num_out == 2)
    it.set(0, "well")
    with pytest.raises(NoDevice):
        it.pool.wait_for_new()
    assert it.pool.num_out == 2 and it.pool.admit_new() == 1 and len(it.routers["router"].urls) == 1


def test_on_devices_that_trainers_share_none_is_taken_back(world: Any, monkeypatch: Any, caplog: Any) -> None:
    """The trainers that are left have none of a node that joins."""
    monkeypatch.setattr(routed_engines, "REPLACED_S", 0.2)
    it = world(use_fault_tolerance=True, placement_timeout_s=0.5)
    it.pool._takes_back = False
    lose(it, 1)
    assert it.pool.finish_starts() and "takes this one back" not in caplog.text
    it.lost = []
    assert not it.pool.finish_starts() and it.pool.left_out == {1}


@pytest.mark.parametrize(("engine", "role"), [(2, ""), (1, "decode")])
def test_one_that_no_other_stands_in_for_is_not_waited_for_without_end(engine: int, role: str, world: Any) -> None:
    it = world(use_fault_tolerance=True, placement_timeout_s=2.0)
    if role:
        it.plan.has_pairs = True
        it.plan.group_of = lambda index: SimpleNamespace(role=("prefill", "decode")[index])
    lose(it, engine)
    with pytest.raises(
        NoDevice, match=rf"engine {engine}: a node of it is dead, .* no other device within 2 s \(--placem"
    ):
        it.pool.finish_starts(True)


def test_with_fault_tolerance_it_gets_the_weights_of_the_next_evaluation(world: Any) -> None:
    it = world(use_fault_tolerance=True)
    pool, router = it.pool, it.routers["eval-router"]
    assert router.urls == ["http://2.3"]
    it.set(2, "dead")
    pool.check(True)
    assert router.urls == [] and pool.evaluation.count_faults() == {"engines_died": 1}
    assert pool.num_out == 0, "the policy's engines serve"
    it.set(2, "well")
    pool.check(False)
    assert pool.find_dead() is None
    # A push that no evaluation follows does not wait for it, and brings it no weights.
    assert not pool.finish_starts() and pool.admit() == 0 and it.addresses == []
    assert pool.finish_starts(True) and router.urls == []
    assert [target.num_restarts for target in pool.targets()] == [0, 0, 1]
    assert pool.admit(True) == 1
    assert router.urls == ["http://2.4"] and it.routers["router"].urls == ["http://0.1", "http://1.2"]
    assert it.addresses == [(["http://0.1", "http://1.2"], ["http://2.4"])]
    assert not pool.finish_starts(True) and pool.admit(True) == 0


def test_the_policy_s_engines_are_replaced_as_before(world: Any) -> None:
    it = world(use_fault_tolerance=True)
    it.set(0, "dead")
    it.pool.check(True)
    assert it.pool.num_out == 1 and it.pool.evaluation.count_faults() == {"engines_died": 0}
    it.set(0, "well")
    assert it.pool.finish_starts() and it.pool.admit() == 1
    assert it.pool.count_faults()["engines_died"] == 1


def test_an_engine_over_several_nodes_ends_with_its_parts(tmp_path: Path) -> None:
    processes, registry = fakes.Processes(tmp_path, 2), ActorRegistry()
    head, part, other = (processes.make(index) for index in (0, 0, 1))
    for name, actor in (("engine 0", head), ("engine 0, node 1", part), ("engine 1", other)):
        registry.add(name, actor, tmp_path / "log")
    launcher: Any = SimpleNamespace(registry=registry, _parts={"engine 0": [part], "engine 1": []})
    Launcher.end_engine(launcher, head)
    assert [member.name for member in registry] == ["engine 1"] and launcher._parts == {"engine 1": []}
    for actor in (head, part):
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.check_alive.remote())
    assert ray.get(other.check_alive.remote()) is None


# -------------------- recovery: which engines are taken out, how they come back, and what ends the run
@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., fakes.Fleet]:
    return lambda count=2, **settings: fakes.Fleet(tmp_path, count, **settings)


def test_a_dead_engine_leaves_the_router_at_once_and_comes_back_with_the_weights(fleet: Any) -> None:
    it = fleet(3)
    it.group.health.begin_round()
    assert it.group.replace_dead() == 0
    it.set(1, "dead")
    assert it.group.replace_dead(is_generating=False) == 1
    assert it.router.told == ["http://1.2"] and it.router.urls == ["http://0.1", "http://2.3"]
    assert (it.folder / "1.2.ended").read_text() == "0.0"  # by force: what waits for it must go on
    assert it.group.num_out == it.group.num_died == 1
    assert it.group.replace_dead() == 0  # it is not found a second time
    it.set(1, "well")
    assert it.group.wait_for_new() == [1]
    assert it.group.wait_for_new() == []
    assert "http://1.4" not in it.router.urls and it.group.urls[1] == "http://1.4"  # it has no weights yet
    assert it.group.num_out == 1
    it.group.admit_new()
    assert it.router.urls == ["http://0.1", "http://2.3", "http://1.4"]
    assert it.group.num_out == 0 and it.group.num_restarts == {1: 1}
    assert [text for text in it.said if "engine 1" in text] == it.said and len(it.said) == 2
    assert it.group.replace_dead() == 0


def test_an_engine_that_hangs_is_found_in_a_round_alone(fleet: Any) -> None:
    it = fleet(first_wait=0.5)
    it.set(0, "hangs")
    assert it.group.replace_dead(is_generating=False) == 0
    it.group.health.begin_round()
    begin = time.monotonic()
    it.check_until(1)
    assert time.monotonic() - begin >= 0.5 + 0.5  # the first wait, and the time limit
    assert it.router.urls == ["http://1.2"]
    it.set(1, "hangs")
    with pytest.raises(RuntimeError, match="engine 1 made no token"):
        it.check_until(2)


@pytest.mark.parametrize("makes_tokens", [False, True])
def test_around_a_push_everyone_is_asked(fleet: Any, makes_tokens: bool) -> None:
    """One that has hung since its last token would hold a push up, and after one that failed each makes a token.

    Also an actor that is gone is a dead engine: a node that is lost takes both along. The death of all ends the run.
    """
    it = fleet(3, interval=1000.0)
    assert it.group.replace_silent(makes_tokens=makes_tokens) == 0
    it.set(1, "hangs")
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(it.engines[2].die.remote())
    assert it.group.replace_silent(makes_tokens=makes_tokens) == 2
    assert it.router.urls == ["http://0.1"] and it.group.num_out == 2
    it.set(0, "hangs")
    with pytest.raises(RuntimeError, match="engine 0 made no token" if makes_tokens else "engine 0 did not answer"):
        it.group.replace_silent(makes_tokens=makes_tokens)


def test_starts_are_tried_a_few_times(fleet: Any) -> None:
    it = fleet()
    it.set(0, "fails to start")
    it.set(1, "starts slowly")
    it.group._take_out(0, RuntimeError("as if dead"))
    with pytest.raises(RuntimeError, match=rf"engine 0 died, .* \({MAX_STARTS} tries\): no memory for engine 0"):
        it.group.wait_for_new()
    assert it.number == 2 + MAX_STARTS
    it.set(0, "well")
    it.group._replace(0)
    assert it.group.wait_for_new() == [0]
    it.group._take_out(1, RuntimeError("as if dead"))

    it.stop.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C and SIGTERM need not wait for it
        it.group.wait_for_new()


def test_where_all_may_die_the_run_goes_on_without_them(fleet: Any) -> None:
    """Engines that evaluate; their numbers follow those of the policy's engines."""
    it = fleet(1, first=2, may_lose_all=True)
    it.set(0, "dead")
    assert it.group.replace_dead() == 1 and it.router.urls == [] and it.group.num_out == 1
    it.set(0, "well")
    assert it.group.replace_dead() == 0  # no engine is left to ask
    assert it.group.wait_for_new() == [0]
    it.group.admit_new()
    assert it.router.urls == ["http://0.2"] and it.group.num_out == 0
    assert it.said[0].startswith("engine 2 is dead") and it.said[1:] == ["engine 2 is back"]
    it.set(0, "fails to start")
    it.group._take_out(0, RuntimeError("as if dead"))
    with pytest.raises(RuntimeError, match="engine 2 died, and could not be started again"):
        it.group.wait_for_new()


# ----------------------------------------------------------------- engines of others, as the list says
A, B = "http://a:1", "http://b:2"
OWN_WEIGHTS = [{"w": "1"}]


class Engine:
    """An engine whose state is a file: {"refuses": …, "fault": …, "running": n}; it notes that it was let go."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def _told(self, name: str) -> Any:
        return json.loads(self.path.read_text()).get(name) if self.path.exists() else None

    def join(self, expected: object = None, *own_weights: list[dict[str, str]]) -> ExternalEngineFacts:
        if own_weights and own_weights[0] != self._told("weights"):
            raise ValueError("its weights differ")
        if (reason := self._told("refuses")) is not None:
            raise ValueError(reason)
        return ExternalEngineFacts("0.5.23", 2, 1)

    def fault(self) -> str | None:
        fault: str | None = self._told("fault")
        return fault

    def num_running(self) -> int:
        return int(self._told("running") or 0)

    def release(self) -> None:
        self.path.with_suffix(".released").touch()


class Party:
    """A run's external, with what the run saw of them."""

    def __init__(self, folder: Path, pushes: bool = True) -> None:
        self.folder, self.said, self.served = folder, list[str](), list[list[str]]()
        self.router = Router([])
        config: Any = None
        plan: Any = SimpleNamespace(layout=object() if pushes else None, num_engines=5, eval_bundles=[], lora_push=None)
        launcher: Any = SimpleNamespace(run_dir=folder, api_key="key", is_alone=True, make_local=self._make)
        own = SimpleNamespace(weight_checksums=SimpleNamespace(remote=lambda: ray.put(OWN_WEIGHTS)))
        pool: Any = SimpleNamespace(engines=[own], present=[own])
        self.engines = ExternalEngines(
            config, plan, launcher, pool, self.said.append, lambda: self.served.append(self.engines.urls)
        )

    def _make(self, kind: type, name: str, index: int, url: str) -> Any:
        return ray.remote(Engine).options(num_cpus=0, max_concurrency=4).remote(str(self.path(url)))

    def path(self, url: str) -> Path:
        return self.folder / f"{url[7]}.json"

    def tell(self, url: str, **state: object) -> None:
        self.path(url).write_text(json.dumps(state))

    def states(self) -> dict[str, str]:
        return {state["url"]: state["state"] for state in read_states(self.folder)}

    def look_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, (self.states(), self.said)
            self.engines.look()
            time.sleep(0.05)

    def start(self, *urls: str) -> None:
        router: Any = self.router
        self.engines.start(router, list(urls))

    def serve(self, *urls: str) -> None:
        """Start engines, and give them requests as after the first push."""
        self.start(*urls)
        self.engines.admit()


@pytest.fixture(autouse=True)
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no model."""
    monkeypatch.setattr(external_engines, "engine_requirements", lambda *_: SimpleNamespace(images=None))


@pytest.fixture
def party(tmp_path: Path) -> Party:
    return Party(tmp_path)


def test_weights_come_before_requests(party: Party) -> None:
    party.start(A)
    assert party.states() == {A: "ready"} and party.router.urls == []
    (target,) = party.engines.targets()
    assert (target.index, target.tp_size, target.host) == (5, 2, "a")
    party.engines.admit()
    assert party.router.urls == [A] == party.engines.urls and party.served == [[A]]
    add_wanted(party.folder, [B])
    party.look_until(lambda: party.states() == {A: "serving", B: "ready"})
    assert party.router.urls == [A] and [target.index for target in party.engines.targets()] == [5, 6]
    party.engines.admit()
    assert party.router.urls == [A, B] and party.served[-1] == [A, B]


def test_none_joins_a_run_that_pushes_adapters(party: Party) -> None:
    party.engines._plan.lora_push = "adapter"  # type: ignore[misc]
    party.start()
    add_wanted(party.folder, [A])
    party.look_until(lambda: party.states() == {A: "refused"})
    assert party.engines.targets() == [] and "--lora-push merged" in party.said[-1]


def test_one_that_leaves_is_drained_and_gets_pushes_until_then(party: Party) -> None:
    party.serve(A, B)
    party.tell(A, running=3)
    remove_wanted(party.folder, [A])
    party.look_until(lambda: party.states()[A] == "leaving")
    assert party.router.urls == [B] and party.served[-1] == [B]
    for _ in range(10):
        party.engines.look()
        time.sleep(0.02)
    assert party.states()[A] == "leaving" and len(party.engines.targets()) == 2
    assert not party.path(A).with_suffix(".released").exists()
    party.tell(A, running=0)
    party.look_until(lambda: party.states()[A] == "gone")
    assert party.path(A).with_suffix(".released").exists() and len(party.engines.targets()) == 1
    add_wanted(party.folder, [A])  # it comes again, under another number: the sender knows no group with it
    party.look_until(lambda: party.states()[A] == "ready")
    assert [target.index for target in party.engines.targets()] == [6, 7]


def test_a_list_that_is_written_in_place_lets_nobody_go(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's `>` empties the file before it writes it."""
    monkeypatch.setattr(external_engines, "_MISSING_S", 60.0)  # this machine may be slow
    party.serve(A, B)
    whole = (party.folder / WANTED).read_text()
    for text in ("", "", whole, f"{A}\n", f"{A}\n", whole):
        (party.folder / WANTED).write_text(text)
        party.engines.look()
    assert party.states() == {A: "serving", B: "serving"} and party.served == [[A, B]]


def test_one_that_dies_is_lost_and_not_asked_again(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_engines, "_PROBE_INTERVAL_S", 0.05)
    party.serve(A, B)
    party.tell(A, fault="connection refused")
    party.look_until(lambda: party.states() == {A: "lost", B: "serving"})
    assert party.router.urls == [B] and "connection refused" in party.said[-1]
    party.tell(A)
    for _ in range(5):
        party.engines.look()
    assert party.states()[A] == "lost"
    remove_wanted(party.folder, [A])
    party.engines.look()
    add_wanted(party.folder, [A])
    party.look_until(lambda: party.states()[A] == "ready")


def test_a_push_that_failed_is_made_without_its_culprits(party: Party) -> None:
    party.serve(A)
    assert not party.engines.drop_culprits(RuntimeError("trainer 0: no memory"))
    add_wanted(party.folder, [B])
    party.look_until(lambda: party.states().get(B) == "ready")
    assert party.engines.drop_culprits(RuntimeError("engine 6: size mismatch"))  # it joined last
    assert party.states() == {A: "serving", B: "ready"}  # written with the next look
    party.engines.look()
    assert party.states() == {A: "serving", B: "lost"}
    party.tell(A, fault="dead")
    assert party.engines.drop_culprits(RuntimeError("engine 5: no answer"))
    assert party.engines.targets() == [] and party.router.urls == []


def test_one_that_lives_and_cannot_load_is_lost_and_not_the_run(party: Party) -> None:
    party.serve(A, B)
    party.tell(B, running=1)
    remove_wanted(party.folder, [B])
    party.look_until(lambda: party.states()[B] == "leaving")
    assert not party.engines.drop_culprits(RuntimeError("engine 55: it is one of the run's own"))
    assert party.engines.drop_culprits(RuntimeError(f"{A}: 500"))
    assert [target.index for target in party.engines.targets()] == [6] and party.router.urls == []
    assert party.engines.drop_culprits(RuntimeError("trainer 0: engine 6, rank 0: size mismatch"))
    assert party.engines.targets() == []


def test_one_that_the_router_takes_too_late_or_not_out(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=RuntimeError("the router is busy"))
    party.start(A, B)
    with monkeypatch.context() as patch:
        patch.setattr(Router, "add_worker", fail)
        party.engines.admit()
    assert party.states() == {A: "lost", B: "lost"} and party.router.told == [A, B]
    remove_wanted(party.folder, [A, B])
    party.engines.look()
    add_wanted(party.folder, [A])
    party.look_until(lambda: party.states()[A] == "ready")
    party.engines.admit()
    remove_wanted(party.folder, [A])
    with monkeypatch.context() as patch:
        patch.setattr(Router, "remove_worker", fail)
        party.engines.look()
    assert party.states()[A] == "serving" and party.router.urls == [A]
    party.look_until(lambda: party.states()[A] == "gone")
    assert party.router.urls == []


def test_one_that_does_not_fit_ends_the_run_if_the_flag_names_it(party: Party) -> None:
    party.start()
    party.tell(B, refuses="engine at http://b:2: it serves another model")
    add_wanted(party.folder, [B])
    party.look_until(lambda: party.states() == {B: "refused"})
    assert "it serves another model" in read_states(party.folder)[0]["note"]
    party.tell(A, refuses="engine at http://a:1: it serves another model")
    with pytest.raises(ValueError, match="--rollout-external-engine-addrs: engine at http://a:1: it serves another"):
        party.start(A)


def test_without_trainers_they_serve_at_once_if_they_have_the_weights_of_an_own_engine(tmp_path: Path) -> None:
    party = Party(tmp_path, pushes=False)
    party.tell(A, weights=[{"w": "2"}])
    party.tell(B, weights=OWN_WEIGHTS)
    with pytest.raises(ValueError, match="its weights differ"):
        party.start(A)
    remove_wanted(tmp_path, [A])
    party.start(B)
    assert party.engines.urls == [B] == party.router.urls


def test_files_that_cannot_be_read_or_written_change_nothing(party: Party, monkeypatch: Any, caplog: Any) -> None:
    fail = Mock(side_effect=OSError(28, "no space is left"))
    party.start(A)
    with monkeypatch.context() as patch:
        patch.setattr(external_engines, "read_wanted", fail)
        patch.setattr(external_engines, "write_states", fail)
        party.engines.admit()
        party.engines.look()
        assert party.engines.urls == [A] and caplog.text.count("no space is left") == 1
    assert party.states() == {A: "ready"}
    party.engines.look()
    assert party.states() == {A: "serving"}
    monkeypatch.setattr(external_engines, "write_states", fail)
    party.engines.release()
    assert party.path(A).with_suffix(".released").exists() and party.engines.targets() == []


def test_an_end_that_fails_holds_up_nobody(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    party.serve(A, B)
    monkeypatch.setattr(ray, "wait", Mock(side_effect=ray.exceptions.RaySystemError("the node is gone")))
    for _ in range(2):
        party.engines.release()
        assert party.engines.targets() == [] and party.states() == {A: "gone", B: "gone"}
