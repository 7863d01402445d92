"""What an object on each node counts; a real cluster's nodes are in tests/e2e/test_two_nodes.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.runtime import node_actors
from fusionrl.runtime.node_actors import NodeActors
from fusionrl.runtime.ray_cluster import CPU_DEVICE_RESOURCE

RESOURCES = {"GPU": 8.0, CPU_DEVICE_RESOURCE: 2.0}
NODES = [
    {"NodeID": "cd" * 28, "NodeManagerAddress": "10.0.0.2", "Alive": True, "Resources": RESOURCES},
    {"NodeID": "ab" * 28, "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": RESOURCES},
    {"NodeID": "ef" * 28, "NodeManagerAddress": "10.0.0.3", "Alive": False, "Resources": RESOURCES},
]


@pytest.mark.parametrize(("device", "num_devices"), [("cuda", 8), ("cpu", 2)])
def test_devices_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch, device: str, num_devices: int) -> None:
    """A cluster with GPUs cannot be had here, so its answers are made up."""
    actors = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: None))
    context = SimpleNamespace(get_node_id=lambda: "ab" * 28)
    cluster: Any = SimpleNamespace(nodes=lambda: NODES, get_runtime_context=lambda: context, remote=lambda kind: actors)
    cluster.shutdown = lambda: None
    monkeypatch.setattr(node_actors, "ray", cluster)
    monkeypatch.setattr(node_actors, "start_ray", lambda *_, **__: None)
    with NodeActors(object, device, "10.0.0.1:6379", allow_open=False) as every:
        found = [(node.name, node.is_own, node.num_devices) for node in every.nodes]
    assert found == [("10.0.0.1", True, num_devices), ("10.0.0.2", False, num_devices)]
