"""`NodeActors`: an object on each node of a running cluster, to examine the nodes before a run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fusionrl.runtime.ray_cluster import CPU_DEVICE_RESOURCE, start_ray

_ANSWER_S = 120.0  # a node's first worker starts Python and imports packages, maybe from a slow disk


@dataclass(frozen=True)
class Node:
    """A node of a cluster.

    name         its address, and with the start of its Ray id where several nodes share an address
    is_own       this process is on it
    num_devices  that Ray counts
    """

    name: str
    address: str
    is_own: bool
    num_devices: int


class NodeActors:
    """A context manager: joins the cluster and puts an object on each node; leaving it ends them and leaves."""

    def __init__(self, kind: type, device: str, address: str, *, allow_open: bool) -> None:
        """`kind` is the objects' class, made without arguments. `device`: "cpu" or "cuda".

        `address` and `allow_open` are those of `start_ray`.
        """
        self._kind, self._device, self._address, self._allow_open = kind, device, address, allow_open
        self.nodes: list[Node] = []
        """The nodes that `ask` calls; callers may remove those that do not answer."""
        self._handles: dict[str, ActorHandle] = {}

    def __enter__(self) -> Self:
        """Raise ValueError if the cluster cannot be joined."""
        start_ray(self._device, 0, address=self._address, dashboard=False, allow_open=self._allow_open)
        try:
            self._spread()
        except BaseException:
            ray.shutdown()
            raise
        return self

    def _spread(self) -> None:
        living = [node for node in ray.nodes() if node["Alive"]]
        shared = Counter(node["NodeManagerAddress"] for node in living)
        own_node = ray.get_runtime_context().get_node_id()
        resource = "GPU" if self._device == "cuda" else CPU_DEVICE_RESOURCE
        for node in sorted(living, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
            identity, address = node["NodeID"], node["NodeManagerAddress"]
            name = address if shared[address] == 1 else f"{address} ({identity[:6]})"
            self.nodes.append(Node(name, address, identity == own_node, int(node["Resources"].get(resource, 0))))
            place = NodeAffinitySchedulingStrategy(identity, soft=False)
            options = {"num_cpus": 0, "num_gpus": 0, "max_restarts": 0, "scheduling_strategy": place}
            self._handles[name] = ray.remote(self._kind).options(**options).remote()

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def ask(self, method: str, *arguments: object) -> Mapping[str, object]:
        """Call a method on all of `nodes` at once; name → answer, or the error in its place."""
        return self.ask_each(method, dict.fromkeys([node.name for node in self.nodes], arguments))

    def ask_each(self, method: str, arguments: Mapping[str, Sequence[object]]) -> Mapping[str, object]:
        """Call a method on some nodes at once: name → its arguments; name → answer, or the error in its place."""
        calls = {name: getattr(self._handles[name], method).remote(*values) for name, values in arguments.items()}
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
        return {name: _answer(reference) for name, reference in calls.items()}


def _answer(reference: ray.ObjectRef) -> object:
    try:
        return ray.get(reference, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return TimeoutError(f"no answer within {_ANSWER_S:.0f} s")
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return RuntimeError(lines[-1].strip())
