"""`EvalEngines`: engines that evaluate and do nothing else (--eval-num-gpus), behind a router of their own.

They are numbered after the policy's engines. A weight push reaches them where an evaluation follows it, and at the
start; between two such pushes they keep their version, whatever the others get.

With --use-fault-tolerance one that dies is replaced. The new one gets the weights of the next evaluation, so nothing
answers a part of this one with other weights: what no other engine takes over fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray.actor import ActorHandle

from fusionrl.engines.router import Router
from fusionrl.plan.plan import Plan
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.recovery import Recovery
from fusionrl.runtime.router_refusals import RefusalWatch


class EvalEngines:
    """The actors and the router; none of both without the flag. `EnginePool` starts, watches and ends the servers."""

    def __init__(self, plan: Plan, launcher: Launcher) -> None:
        self._plan, self._launcher = plan, launcher
        self.engines: list[ActorHandle] = []
        self.urls: list[str] = []
        self._router: Router | None = None
        self.refusals: RefusalWatch | None = None
        self.recovery: Recovery | None = None  # --use-fault-tolerance

    def make(self) -> list[ActorHandle]:
        """Make the actors, whose servers are not started yet."""
        first = self._plan.num_engines
        indices = range(first, first + len(self._plan.eval_bundles))
        self.engines = [self._launcher.make_engine("engine", index) for index in indices]
        return self.engines

    def start_router(self) -> str:
        """Start the router, still empty; returns its address, "" where there are no engines."""
        if not self.engines:
            return ""
        self._router = self._launcher.make_router("eval-router")
        self.refusals = RefusalWatch(self._router)
        return self._router.start()

    def join(self, urls: Sequence[str]) -> None:
        """Put the engines, which serve at `urls`, into the router."""
        self.urls = list(urls)
        for url in self.urls:
            assert self._router is not None
            self._router.add_worker(url, self._launcher.api_key)

    def replace_dead(self, make_recovery: Callable[..., Recovery]) -> None:
        """From now on, replace engines that die; the run goes on also where all do."""
        if self._router is not None:
            first = self._plan.num_engines
            self.recovery = make_recovery(self._router, self.engines, self.urls, first=first, may_lose_all=True)

    def count_faults(self) -> dict[str, float]:
        """With --use-fault-tolerance: the deaths so far."""
        return {} if self.recovery is None else {"engines_died": float(self.recovery.num_died)}

    def check_router(self) -> None:
        """Raise with the end of its log when the router is dead."""
        if self._router is not None:
            self._router.check_alive()

    def end_router(self) -> None:
        """End the router. Idempotent."""
        if self._router is not None:
            self._router.shutdown()
        self._router = self.refusals = self.recovery = None
