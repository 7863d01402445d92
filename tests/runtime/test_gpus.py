"""GPUs as Ray gives them out, by the names of CUDA_VISIBLE_DEVICES. Ray is real, the GPUs are names alone."""

import base64
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
import ray
from ray._private.services import get_node_ip_address

from fusionrl.base.environment import DETERMINISTIC_CPU, DETERMINISTIC_GPU
from fusionrl.config.config import Config
from fusionrl.plan.devices import Gpu
from fusionrl.runtime import engine_pool, ray_cluster
from fusionrl.runtime.engine_pool import EnginePool
from fusionrl.runtime.launcher import LocalLauncher
from fusionrl.runtime.ray_cluster import CPU_DEVICE_RESOURCE, NodeActors, start_ray
from tests.own_process import run_code
from tests.plan.test_plan import plan as make_plan

PROGRAM = """
import json, os
import ray
from fusionrl.runtime.ray_cluster import actor_on, place_devices, start_ray

class Actor:
    def devices(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

start_ray("cuda", 3, address=None, dashboard=False)
group, bundles = place_devices("cuda", 3, 30.0)
actors = [actor_on(Actor, bundle, group, env={}).remote() for bundle in bundles[1:]]
seen = ray.get([actor.devices.remote() for actor in actors])
print(json.dumps([[[bundle.gpu.position, bundle.gpu.ordinal] for bundle in bundles], seen]))
ray.shutdown()
"""


def test_processes_of_a_node_count_alike():
    """Names that are no numbers; each process has its node's list, or its one MIG slice."""
    names = "GPU-bbbb,GPU-aaaa,MIG-cccc"
    places, seen = json.loads(run_code(PROGRAM, CUDA_VISIBLE_DEVICES=names).splitlines()[-1])
    assert places == [[0, 0], [1, 1], [2, 0]] and seen == [names, "MIG-cccc"]


def test_engines_give_their_memory_once_and_dead_ones_are_looked_for_first(monkeypatch):
    calls = Mock()
    pool = SimpleNamespace(
        _plan=SimpleNamespace(engines_give_memory=True),
        is_memory_away=False,
        is_recovering=True,
        present=[calls.engine],
        replace_dead=calls.replace_dead,
        finish_starts=calls.finish_starts,
    )
    monkeypatch.setattr(engine_pool, "get", lambda refs, **_: refs)
    EnginePool.release_memory(pool, ["kv_cache"])
    EnginePool.release_memory(pool, ["kv_cache"])  # it is away
    assert calls.mock_calls == [
        *(call.replace_dead(is_generating=False), call.finish_starts()),
        *(call.engine.flush_cache.remote(), call.engine.release_memory.remote(["kv_cache"])),
    ]


def test_a_run_in_one_process_counts_gpus_by_the_list(tmp_path):
    made = make_plan("cuda", actor_num_gpus_per_node=1, colocate=True)
    launcher = LocalLauncher(
        Config.from_flat({}), made, tmp_path, 0, SimpleNamespace(begin=lambda *_: None, folder=tmp_path)
    )
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "6,7"}):
        launcher.start()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert [bundle.gpu for bundle in launcher.bundles] == [Gpu(0, 0)]


@pytest.mark.parametrize(("device", "settings"), [("cuda", DETERMINISTIC_GPU), ("cpu", DETERMINISTIC_CPU)])
def test_bitwise_in_one_process_has_the_variables_of_trainers(device: Any, settings: Any, tmp_path: Path) -> None:
    """torch refuses cuBLAS's products without CUBLAS_WORKSPACE_CONFIG once it is to be deterministic."""
    made = make_plan(device, actor_num_gpus_per_node=1, colocate=True)
    start = SimpleNamespace(begin=lambda *_: None, folder=tmp_path)
    launcher = LocalLauncher(Config.from_flat({"bitwise": True}), made, tmp_path, 0, start)
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}):
        launcher.start()
        assert os.environ.items() >= settings.items()


# ------------------------------------------------------------------------------ an object on each node
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
    monkeypatch.setattr(ray_cluster, "ray", cluster)
    monkeypatch.setattr(ray_cluster, "start_ray", lambda *_, **__: None)
    with NodeActors(object, device, "10.0.0.1:6379", allow_open=False) as every:
        found = [(node.name, node.is_own, node.num_devices) for node in every.nodes]
    assert found == [("10.0.0.1", True, num_devices), ("10.0.0.2", False, num_devices)]


# ------------------ a cluster of somebody else is joined only if it refuses a client that has no token
@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Starts Ray's GCS alone, with the given RAY_AUTH_MODE; its address. It is up in a tenth of a second."""
    started: list[subprocess.Popen[bytes]] = []
    host = get_node_ip_address()

    def start(mode: str) -> str:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        options = {"log_dir": tmp_path, "session-dir": tmp_path, "config_list": base64.b64encode(b"{}").decode()}
        options |= {"gcs_server_port": port, "metrics-agent-port": 0, "node-ip-address": host, "session-name": "test"}
        program = Path(ray.__path__[0], "core", "src", "ray", "gcs", "gcs_server")
        command = [str(program), "--ray-commit=x", *(f"--{name}={value}" for name, value in options.items())]
        environ = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "a" * 64}
        started.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for _ in range(300):
            try:
                socket.create_connection((host, port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        return f"{host}:{port}"

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that would have been joined."""
    addresses: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **options: addresses.append(address))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


def join(address: str) -> None:
    start_ray("cpu", 1, address=address, dashboard=False)


def test_by_host_and_port_and_by_auto(gcs: Callable[[str], str], joined: list[str], monkeypatch: Any) -> None:
    closed = gcs("token")
    join(closed)
    monkeypatch.setenv("RAY_ADDRESS", gcs("disabled"))
    with pytest.raises(ValueError, match="--ray-address auto: .*--allow-open-ray"):
        join("auto")
    assert joined == [closed]
    start_ray("cpu", 1, address="auto", dashboard=False, allow_open=True)
    assert len(joined) == 2


@pytest.mark.parametrize("address", ["localhost", "ray://127.0.0.1:10001", "local"])
def test_what_cannot_be_asked_is_refused(address: str, joined: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"--ray-address {address}: .*host:port"):
        join(address)
    assert not joined


def test_a_server_that_is_no_ray_is_refused(joined: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers."""
    monkeypatch.setattr(ray_cluster, "_PROBE_TIMEOUT_S", 0.5)
    with socket.create_server((get_node_ip_address(), 0)) as server:
        host, port = server.getsockname()
        with pytest.raises(ValueError, match="did not say"):
            join(f"{host}:{port}")
    assert not joined


def test_any_other_error_of_the_probe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_PROBE", "raise OSError('no such library')")
    with pytest.raises(ValueError, match="did not say.*no such library"):
        ray_cluster._closed_cluster("127.0.0.1:6379")
