"""Which engines are taken out, how they come back, and what ends the run. Ray is real, the engines are not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from fusionrl.cluster.ray_cluster import start_ray
from fusionrl.cluster.recovery import MAX_STARTS, Recovery


class Engine:
    """Acts as the file of its index says: "dead", "hangs", "fails to start", "starts slowly"; anything else is well."""

    def __init__(self, folder: str, index: int, number: int) -> None:
        self.path, self.index, self.number = Path(folder, str(index)), index, number

    def start(self) -> str:
        if self.path.read_text() == "fails to start":
            raise RuntimeError(f"no memory for engine {self.index}")
        if self.path.read_text() == "starts slowly":
            time.sleep(60)
        return f"http://{self.index}.{self.number}"

    def fault(self, timeout_s: float | None = None) -> str | None:
        state = self.path.read_text()
        if timeout_s is not None and state == "hangs":
            time.sleep(timeout_s)
            return f"engine {self.index} made no token"
        return f"engine {self.index} was killed" if state == "dead" else None

    def die(self) -> None:
        os._exit(1)

    def shutdown(self, timeout_s: float) -> None:
        self.path.with_suffix(f".{self.number}.ended").write_text(str(timeout_s))


class Router:
    """Keeps what it was told, in order."""

    def __init__(self, urls: list[str]) -> None:
        self.urls, self.told = list(urls), list[str]()

    def add_worker(self, url: str, api_key: str | None) -> None:
        assert api_key == "key"
        self.urls.append(url)

    def remove_worker(self, url: str) -> None:
        self.urls.remove(url)
        self.told.append(url)


class Fleet:
    """Engines 0, 1, … with a `Recovery` over them."""

    def __init__(self, folder: Path, count: int, **seconds: float) -> None:
        self.folder, self.number, self.said = folder, 0, list[str]()
        for index in range(count):
            self.set(index, "well")
        self.engines = [self.make(index) for index in range(count)]
        self.urls = ray.get([engine.start.remote() for engine in self.engines])
        self.router = Router(self.urls)
        limits = {"interval_s": 0.1, "timeout_s": 0.5, "first_wait_s": 0.0} | seconds
        router: Any = self.router
        self.recovery = Recovery(
            self.engines, self.urls, router, self.make, api_key="key", say=self.said.append, **limits
        )

    def make(self, index: int) -> Any:
        self.number += 1
        return ray.remote(Engine).options(num_cpus=0, max_concurrency=4).remote(str(self.folder), index, self.number)

    def set(self, index: int, state: str) -> None:
        (self.folder / str(index)).write_text(state)

    def check_until(self, count: int, limit_s: float = 20.0) -> None:
        deadline = time.monotonic() + limit_s
        while self.recovery.num_died < count and time.monotonic() < deadline:
            self.recovery.check()
            time.sleep(0.02)
        assert self.recovery.num_died == count


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_ray("cpu", 1, address=None, dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., Fleet]:
    return lambda count=2, **seconds: Fleet(tmp_path, count, **seconds)


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
    it = fleet(first_wait_s=0.5)
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


def test_after_a_failed_push_everyone_is_asked(fleet: Any) -> None:
    """Also an actor that is gone is a dead engine: a node that is lost takes both along."""
    it = fleet(3, interval_s=1000.0)
    assert it.recovery.find_hung() == 0
    it.set(1, "hangs")
    it.engines[2].die.remote()
    assert it.recovery.find_hung() == 2
    assert it.router.urls == ["http://0.1"]


def test_the_death_of_all_ends_the_run(fleet: Any) -> None:
    it = fleet()
    for index in range(2):
        it.set(index, "dead")
    with pytest.raises(RuntimeError, match="engine [01] was killed"):
        it.recovery.check()


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

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # Ctrl-C and SIGTERM need not wait for it
        it.recovery.finish_starts(stop)
