"""A cluster of somebody else is joined only if it refuses a client that has no token."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.services import get_node_ip_address

from fusionrl.runtime import ray_cluster
from fusionrl.runtime.ray_cluster import start_ray


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
