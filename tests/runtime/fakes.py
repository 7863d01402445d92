"""Engines that act as a file says, and a router that notes what it is told. Ray is real, the engines are not."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ray

from fusionrl.runtime.routed_engines import RoutedEngines


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

    def fault(self, timeout_s: float | None = None, *, makes_tokens: bool = True) -> str | None:
        state = self.path.read_text()
        if timeout_s is not None and state == "hangs":
            time.sleep(timeout_s)
            return f"engine {self.index} made no token" if makes_tokens else f"engine {self.index} did not answer"
        return f"engine {self.index} was killed" if state == "dead" else None

    def check_alive(self) -> None:
        if (fault := self.fault()) is not None:
            raise RuntimeError(fault)

    def die(self) -> None:
        os._exit(1)

    def flush_cache(self) -> None: ...

    def release_memory(self, tags: list[str] | None) -> None: ...

    def resume_memory(self, tags: list[str]) -> None: ...

    def shutdown(self, timeout_s: float | None = None) -> None:
        self.path.with_suffix(f".{self.number}.ended").write_text(str(timeout_s))


class Router:
    """Keeps what it was told, in order."""

    def __init__(self, urls: list[str]) -> None:
        self.urls, self.told = list(urls), list[str]()

    def add_worker(self, url: str, api_key: str | None) -> None:
        assert api_key == "key"
        self.urls.append(url)

    def remove_worker(self, url: str) -> None:
        self.urls = [known for known in self.urls if known != url]
        self.told.append(url)


class Processes:
    """Makes actors of engines 0, 1, …; all are well at first."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.number = folder, 0
        for index in range(count):
            self.set(index, "well")

    def make(self, index: int) -> Any:
        self.number += 1
        return ray.remote(Engine).options(num_cpus=0, max_concurrency=4).remote(str(self.folder), index, self.number)

    def set(self, index: int, state: str) -> None:
        (self.folder / str(index)).write_text(state)


class Fleet(Processes):
    """Engines behind a router, which are replaced when they die; `stop` is called while one waits for a new one."""

    def __init__(self, folder: Path, count: int, *, first: int = 0, may_lose_all: bool = False, **flags: float) -> None:
        """`flags`: --rollout-health-check-…"""
        super().__init__(folder, count)
        self.said, self.stop = list[str](), Mock()
        limits = {"interval": 0.1, "timeout": 0.5, "first_wait": 0.0} | flags
        rollout = SimpleNamespace(**{f"rollout_health_check_{name}": value for name, value in limits.items()})
        config: Any = SimpleNamespace(rollout=rollout, cluster=SimpleNamespace(placement_timeout_s=120.0))
        launcher: Any = SimpleNamespace(api_key="key", make_engine=lambda role, index: self.make(index - first))
        launcher.end_engine, launcher.has_lost_engine = ray.kill, lambda role, index: False
        parts = (config, launcher, self.said.append, self.stop)
        self.group = RoutedEngines(*parts, first=first, may_lose_all=may_lose_all)
        self.engines = self.group.engines
        self.engines += [self.make(index) for index in range(count)]
        self.group.urls = ray.get([engine.start.remote() for engine in self.engines])
        self.router: Any = Router(self.group.urls)
        self.group.router, self.group.is_recovering = self.router, True

    def check_until(self, count: int, limit_s: float = 20.0) -> None:
        deadline = time.monotonic() + limit_s
        while self.group.num_died < count and time.monotonic() < deadline:
            self.group.replace_dead()
            time.sleep(0.02)
        assert self.group.num_died == count
