"""An engine that only evaluates dies: what the pool of engines does. Ray is real, engines and routers are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.config.config import Config
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.recovery import MAX_STARTS
from tests.runtime import fakes


class Router(fakes.Router):
    """A router that starts without engines."""

    url = "http://router"

    def __init__(self) -> None:
        super().__init__([])

    def start(self) -> str:
        return self.url

    def check_alive(self) -> None: ...

    def shutdown(self) -> None: ...

    def num_retries(self) -> int:
        return 0


class World(fakes.Processes):
    """Two engines of the policy, engine 2 that evaluates, and their pool."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        super().__init__(folder, 3)
        self.routers: dict[str, Router] = {}
        self.addresses: list[tuple[list[str], list[str]]] = []
        plan: Any = SimpleNamespace(num_engines=2, scorers=(), eval_bundles=((2,),), engines_give_memory=False)
        plan.all_engine_bundles = ((0,), (1,), (2,))
        plan.group_of = lambda engine: None
        bundles = [SimpleNamespace(node_id="node")] * 3
        launcher: Any = SimpleNamespace(make_router=self.make_router, api_key="key", bundles=bundles)
        launcher.make_engine = lambda role, index: self.make(index)
        self.pool = EnginePool(Config.from_flat(flags), plan, launcher, on_addresses=self.note)
        self.pool.start()

    def note(self) -> None:
        self.addresses.append((list(self.pool.urls), list(self.pool.evaluation.urls)))

    def make_router(self, name: str = "router") -> Router:
        self.routers[name] = Router()
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


def test_one_that_dies_as_the_router_gets_it_is_found_with_its_log(tmp_path: Path, monkeypatch: Any) -> None:
    it, add_worker = World(tmp_path), Router.add_worker

    def refuse(router: Router, url: str, api_key: str | None) -> None:
        add_worker(router, url, api_key)
        if router is it.routers["eval-router"]:
            it.set(2, "dead")
            raise RuntimeError("the router does not take it")

    monkeypatch.setattr(Router, "add_worker", refuse)
    with pytest.raises(RuntimeError, match="does not take it"):
        it.pool.finish_start()
    found = it.pool.find_dead()
    assert found is not None and "engine 2 was killed" in str(found)


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
    assert not pool.finish_starts() and pool.join() == 0 and it.addresses == []
    assert pool.finish_starts(True) and router.urls == []
    assert [target.num_restarts for target in pool.targets()] == [0, 0, 1]
    assert pool.join(True) == 1
    assert router.urls == ["http://2.4"] and it.routers["router"].urls == ["http://0.1", "http://1.2"]
    assert it.addresses == [(["http://0.1", "http://1.2"], ["http://2.4"])]
    assert not pool.finish_starts(True) and pool.join(True) == 0


def test_the_policy_s_engines_are_replaced_as_before(world: Any) -> None:
    it = world(use_fault_tolerance=True)
    it.set(0, "dead")
    it.pool.check(True)
    assert it.pool.num_out == 1 and it.pool.evaluation.count_faults() == {"engines_died": 0}
    it.set(0, "well")
    assert it.pool.finish_starts() and it.pool.join() == 1
    assert it.pool.count_faults()["engines_died"] == 1


# -------------------- recovery: which engines are taken out, how they come back, and what ends the run
@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., fakes.Fleet]:
    return lambda count=2, **settings: fakes.Fleet(tmp_path, count, **settings)


def nothing() -> None: ...


def test_a_dead_engine_leaves_the_router_at_once_and_comes_back_with_the_weights(fleet: Any) -> None:
    it = fleet(3)
    it.recovery.begin_round()
    assert it.recovery.check() == 0
    it.set(1, "dead")
    assert it.recovery.check(is_generating=False) == 1
    assert it.router.told == ["http://1.2"] and it.router.urls == ["http://0.1", "http://2.3"]
    assert (it.folder / "1.2.ended").read_text() == "0.0"  # by force: what waits for it must go on
    assert it.recovery.num_out == it.recovery.num_died == 1
    assert it.recovery.check() == 0  # it is not found a second time
    it.set(1, "well")
    assert it.recovery.finish_starts(nothing) == [1]
    assert it.recovery.finish_starts(nothing) == []
    assert "http://1.4" not in it.router.urls and it.urls[1] == "http://1.4"  # it has no weights yet
    assert it.recovery.num_out == 1
    it.recovery.join()
    assert it.router.urls == ["http://0.1", "http://2.3", "http://1.4"]
    assert it.recovery.num_out == 0 and it.recovery.num_restarts == {1: 1}
    assert [text for text in it.said if "engine 1" in text] == it.said and len(it.said) == 2
    assert it.recovery.check() == 0


def test_an_engine_that_hangs_is_found_in_a_round_alone(fleet: Any) -> None:
    it = fleet(first_wait=0.5)
    it.set(0, "hangs")
    assert it.recovery.check(is_generating=False) == 0
    it.recovery.begin_round()
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
    assert it.recovery.check_answers(makes_tokens=makes_tokens) == 0
    it.set(1, "hangs")
    it.engines[2].die.remote()
    assert it.recovery.check_answers(makes_tokens=makes_tokens) == 2
    assert it.router.urls == ["http://0.1"] and it.recovery.num_out == 2
    it.set(0, "hangs")
    with pytest.raises(RuntimeError, match="engine 0 made no token" if makes_tokens else "engine 0 did not answer"):
        it.recovery.check_answers(makes_tokens=makes_tokens)


def test_starts_are_tried_a_few_times(fleet: Any) -> None:
    it = fleet()
    it.set(0, "fails to start")
    it.set(1, "starts slowly")
    it.recovery._take_out(0, RuntimeError("as if dead"))
    with pytest.raises(RuntimeError, match=rf"engine 0 died, .* \({MAX_STARTS} tries\): no memory for engine 0"):
        it.recovery.finish_starts(nothing)
    assert it.number == 2 + MAX_STARTS
    it.set(0, "well")
    it.recovery._replace(0)
    assert it.recovery.finish_starts(nothing) == [0]
    it.recovery._take_out(1, RuntimeError("as if dead"))

    with pytest.raises(KeyboardInterrupt):  # Ctrl-C and SIGTERM need not wait for it
        it.recovery.finish_starts(Mock(side_effect=KeyboardInterrupt))


def test_where_all_may_die_the_run_goes_on_without_them(fleet: Any) -> None:
    """Engines that evaluate; their numbers follow those of the policy's engines."""
    it = fleet(1, first=2, may_lose_all=True)
    it.set(0, "dead")
    assert it.recovery.check() == 1 and it.router.urls == [] and it.recovery.num_out == 1
    it.set(0, "well")
    assert it.recovery.check() == 0  # nobody is left to be asked
    assert it.recovery.finish_starts(nothing) == [0]
    it.recovery.join()
    assert it.router.urls == ["http://0.2"] and it.recovery.num_out == 0
    assert it.said[0].startswith("engine 2 is dead") and it.said[1:] == ["engine 2 is back"]
    it.set(0, "fails to start")
    it.recovery._take_out(0, RuntimeError("as if dead"))
    with pytest.raises(RuntimeError, match="engine 2 died, and could not be started again"):
        it.recovery.finish_starts(nothing)
