"""Stores of process groups: joined by those who should, and by nobody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.base.torch_stores import (
    FOLDER_VARIABLE,
    PEERS_VARIABLE,
    create_group_store,
    engine_store,
    join_group_store,
    refuse_others,
)
from fusionrl.engines.process import PortReservation
from tests.e2e.strangers import is_loopback, listeners


def _connects(port: int, source: str) -> bool:
    with socket.socket() as client:
        client.settimeout(0.5)
        client.bind((source, 0))
        try:
            client.connect(("127.0.0.1", port))
        except TimeoutError:
            return False
        return True


def test_a_store_listens_on_its_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    store = create_group_store("127.0.0.1", 30.0)
    (found,) = [one for one in listeners({os.getpid()}) if one.port == store.port]
    assert found.address == "127.0.0.1"
    join_group_store("127.0.0.1", store.port, 30.0).set("key", "value")
    assert store.get("key") == b"value"


def test_the_ranks_of_an_engine_over_nodes_meet_at_a_reserved_port_that_strangers_do_not_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server has reserved the port before the ranks start, and lets go of it when they have met."""
    monkeypatch.setenv(PEERS_VARIABLE, "127.0.0.7")
    with PortReservation("127.0.0.1") as reserved:
        master = engine_store("127.0.0.1", reserved.port, 30.0, is_master=True)
        engine_store("127.0.0.1", reserved.port, 30.0, is_master=False).set("key", "value")
        assert master.get("key") == b"value"
        assert _connects(reserved.port, "127.0.0.7") and not _connects(reserved.port, "127.0.0.8")
        (found,) = [one for one in listeners({os.getpid()}) if one.port == reserved.port]
        assert found.address == "127.0.0.1"


def test_the_kernel_drops_who_is_no_node_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any address of 127/8 is this machine, so other addresses can be tried here."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv(PEERS_VARIABLE, "127.0.0.7,127.0.0.8")
    store = create_group_store("127.0.0.1", 30.0)
    assert all(_connects(store.port, f"127.0.0.{last}") for last in (1, 7, 8))
    assert not any(_connects(store.port, f"127.0.0.{last}") for last in (2, 6, 9))
    assert not _connects(store.port, "127.7.0.0")


def test_a_filter_of_many_nodes() -> None:
    with socket.socket() as listener:
        refuse_others(listener, [f"127.0.1.{last}" for last in range(1, 200)])
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert _connects(port, "127.0.1.1") and _connects(port, "127.0.1.199")
        assert not _connects(port, "127.0.1.200")


def test_on_one_machine_nothing_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A number takes the place of a port; each store has its own, in a file that nobody else can read."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    before = {one.port for one in listeners({os.getpid()})}
    first, second = (create_group_store("127.0.0.1", 30.0) for _ in range(2))
    assert {one.port for one in listeners({os.getpid()})} == before
    assert first.port != second.port
    join_group_store("127.0.0.1", first.port, 30.0).set("key", "of the first")
    join_group_store("127.0.0.1", second.port, 30.0).set("key", "of the second")
    assert (first.get("key"), second.get("key")) == (b"of the first", b"of the second")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from fusionrl.engines import rendezvous
from fusionrl.weights.process_group import init_external_group
from fusionrl.base.torch_stores import create_group_store
rank, port = int(sys.argv[1]), 29999
rendezvous.install()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
ones = torch.ones(1)
dist.all_reduce(ones)
# A group of its own, as for a weight push: rank 0 makes the store, and tells its number.
numbers = [create_group_store("127.0.0.1", 60.0).port if rank == 0 else None]
dist.broadcast_object_list(numbers)
store, found_rank, size = next(
    dist.rendezvous(f"tcp://127.0.0.1:{numbers[0]}", rank, 2)
)
group = init_external_group("gloo", store, size, found_rank, "push", 60.0)
dist.all_reduce(ones, group=group)
print(ones.item(), flush=True)
sys.stdin.read()
"""


def test_sglangs_ranks_meet_without_a_tcp_store(tmp_path: Path) -> None:
    """Two processes that say tcp://127.0.0.1:29999, as SGLang's do: what listens is gloo, on loopback."""
    (tmp_path / "stores").mkdir()
    env = os.environ | {FOLDER_VARIABLE: str(tmp_path / "stores"), "TMPDIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env | {"PYTHONPATH": str(root)},
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "4.0\n"
        found = listeners({process.pid for process in ranks})
        assert found and all(is_loopback(one.address) and one.port != 29999 for one in found), found
        assert (tmp_path / "world-29999").is_file()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
