"""An engine that only evaluates dies: what the pool of engines does. Ray is real, engines and routers are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fusionrl.config.config import Config
from fusionrl.runtime.engine_pool import EnginePool
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


class World:
    """Two engines of the policy, engine 2 that evaluates, and their pool."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self.folder, self.number = folder, 0
        self.routers: dict[str, Router] = {}
        self.addresses: list[tuple[list[str], list[str]]] = []
        for index in range(3):
            self.set(index, "well")
        plan: Any = SimpleNamespace(num_engines=2, scorers=(), eval_bundles=((2,),), engines_give_memory=False)
        plan.all_engine_bundles = ((0,), (1,), (2,))
        plan.group_of = lambda engine: None
        bundles = [SimpleNamespace(node_id="node")] * 3
        launcher: Any = SimpleNamespace(
            make_engine=self.make, make_router=self.make_router, api_key="key", bundles=bundles
        )
        self.pool = EnginePool(Config.from_flat(flags), plan, launcher, on_addresses=self.note)
        self.pool.start()

    def note(self) -> None:
        self.addresses.append((list(self.pool.urls), list(self.pool.evaluation.urls)))

    def make(self, role: str, index: int) -> Any:
        self.number += 1
        engine = ray.remote(fakes.Engine).options(num_cpus=0, max_concurrency=4)
        return engine.remote(str(self.folder), index, self.number)

    def make_router(self, name: str = "router") -> Router:
        self.routers[name] = Router()
        return self.routers[name]

    def set(self, index: int, state: str) -> None:
        (self.folder / str(index)).write_text(state)


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


def test_one_that_dies_as_the_router_gets_it_is_found_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
