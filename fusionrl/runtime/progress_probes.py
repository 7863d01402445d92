"""The progress of a stalled run, as its engines, its Buffer and its other nodes report it.

Called from the watchdog's thread. Each probe has a time limit, as the process that it asks may hang.
"""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fusionrl.engines.http import call
from fusionrl.observe.stalls import EngineLoad, ProcessState, look
from fusionrl.runtime.buffer_handle import BufferHandle
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.launcher import Launcher
from fusionrl.runtime.ray_cluster import is_running

_ANSWER_S = 3.0
_BETWEEN_S = 1.0  # two looks at an engine
_NODE_S = 20.0  # a Ray worker may have to start there
_MOST_ENGINES = 8  # that one line names


class ProgressProbes:
    """Functions that report how far a run is; each answers within seconds or not at all."""

    def __init__(self, launcher: Launcher, engines: EnginePool, buffer: BufferHandle) -> None:
        self._launcher, self._pool, self._buffer = launcher, engines, buffer

    def name_of(self, reference: object) -> str:
        """Return the name of the actor that a reference waits for; "" if it is done or belongs to no actor."""
        if not isinstance(reference, ray.ObjectRef) or ray.wait([reference], timeout=0, fetch_local=False)[0]:
            return ""
        actor = reference.task_id().actor_id().hex()
        return next((member.name for member in self._launcher.registry if member.id == actor), "")

    def sizes(self) -> Counter[str]:
        """Return the sizes of the groups of actors: "trainer rank" → 8."""
        return Counter(member.name.rpartition(" ")[0] for member in self._launcher.registry)

    def engines(self) -> Sequence[EngineLoad]:
        """Ask engines how busy they are: first faults, then engines without progress, the busiest first."""
        urls = dict(enumerate([*self._pool.urls, *self._pool.evaluation.urls]))
        if not urls:
            return []
        api_key = self._launcher.api_key
        with ThreadPoolExecutor(min(16, len(urls))) as threads:
            loads = list(threads.map(lambda item: _load(f"engine {item[0]}", item[1], api_key), urls.items()))
        loads.sort(key=lambda load: (not load.fault, load.tokens_per_s > 0, -load.running))
        return loads[:_MOST_ENGINES]

    def progress(self) -> Sequence[str]:
        """Ask the Buffer about rollouts and rewards, in words."""
        if not self._buffer.is_started:
            return []
        answer = self._buffer.actor.progress.remote()
        if not ray.wait([answer], timeout=_ANSWER_S)[0]:
            return [
                f"the Buffer has not started yet, or does not answer within {_ANSWER_S:g} s: a user function may block"
                " its event loop (a call that blocks, in an async function)"
            ]
        text = ray.get(answer)
        return [text] if text else []

    def elsewhere(self) -> Sequence[ProcessState]:
        """Look at the run's processes on its other nodes. A node that does not answer is left out."""
        if not is_running():
            return []
        own_node = ray.get_runtime_context().get_node_id()
        nodes = sorted({bundle.node_id for bundle in self._launcher.bundles} - {own_node})
        return look_on(nodes, self._launcher.run_dir / "logs") if nodes else []


def _load(name: str, url: str, api_key: str) -> EngineLoad:
    try:
        first = _numbers(url, api_key)
        time.sleep(_BETWEEN_S)
        second = _numbers(url, api_key)
    except RuntimeError:
        return EngineLoad(name, fault=f"does not answer within {_ANSWER_S:g} s")
    running, waiting, speed, tokens = second
    # A stalled scheduler keeps reporting its last numbers.
    return EngineLoad(name, int(running), int(waiting), 0.0 if tokens == first[3] else speed)


def _numbers(url: str, api_key: str) -> tuple[float, float, float, float]:
    """Requests running and waiting, tokens a second, and tokens in the KV cache, over its data-parallel parts. Raises
    RuntimeError if there is none, or it has another form."""
    answer = call("GET", f"{url}/v1/loads?include=core", api_key=api_key, timeout_s=_ANSWER_S)
    loads = answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(loads, list):
        raise RuntimeError(f"{url}/v1/loads answered in another form")

    def total(name: str) -> float:
        return float(sum(load.get(name) or 0.0 for load in loads))

    return total("num_running_reqs"), total("num_waiting_reqs"), total("gen_throughput"), total("num_used_tokens")


def look_on(nodes: Sequence[str], logs: Path) -> list[ProcessState]:
    """Look at the run's processes on nodes of the cluster."""
    task = ray.remote(num_cpus=0, num_gpus=0, max_retries=0)(_look_at)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    looks = [task.options(scheduling_strategy=place).remote(str(logs)) for place in places]
    done, late = ray.wait(looks, num_returns=len(looks), timeout=_NODE_S)
    for reference in late:
        ray.cancel(reference, force=True)
    seen: list[ProcessState] = []
    for reference in done:
        seen += ray.get(reference)
    return seen


def _look_at(logs: str) -> list[ProcessState]:
    return look(Path(logs))
