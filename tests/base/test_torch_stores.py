"""Stores of process groups: joined by those who should, and by nobody else."""

import os
import socket
from pathlib import Path

import pytest

from fusionrl.base import group_stores
from fusionrl.base.group_stores import FOLDER_VARIABLE, PEERS_VARIABLE, create_group_store, join_group_store
from fusionrl.engines.process import PortReservation
from tests.e2e.strangers import listeners


def _connects(port: int, source: str) -> bool:
    with socket.socket() as client:
        client.settimeout(0.3)
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


def test_ranks_over_nodes_meet_at_a_reserved_port_that_strangers_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's server has reserved the port before the ranks start, and lets go of it when they have met."""
    monkeypatch.setenv(PEERS_VARIABLE, "127.0.0.7")
    with PortReservation("127.0.0.1") as reserved:
        master = group_stores.engine_store("127.0.0.1", reserved.port, 30.0, is_master=True)
        group_stores.engine_store("127.0.0.1", reserved.port, 30.0, is_master=False).set("key", "value")
        assert master.get("key") == b"value"
        assert _connects(reserved.port, "127.0.0.7") and not _connects(reserved.port, "127.0.0.8")
        (found,) = [one for one in listeners({os.getpid()}) if one.port == reserved.port]
        assert found.address == "127.0.0.1"


@pytest.mark.parametrize("num_nodes", [2, 198])
def test_the_kernel_drops_who_is_no_node_of_the_cluster(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any address of 127/8 is this machine, so other addresses can be tried here."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv(PEERS_VARIABLE, ",".join(f"127.0.0.{7 + node}" for node in range(num_nodes)))
    store = create_group_store("127.0.0.1", 30.0)
    assert all(_connects(store.port, f"127.0.0.{last}") for last in (1, 7, 6 + num_nodes))
    assert not any(_connects(store.port, f"127.0.0.{last}") for last in (2, 6, 7 + num_nodes))
    assert not _connects(store.port, "127.7.0.0")


def test_on_one_machine_nothing_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A number takes the place of a port; each store has its own, in a file that nobody else can read."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    before = {one.port for one in listeners({os.getpid()})}
    first, second = (create_group_store("127.0.0.1", 30.0) for _ in range(2))
    assert {one.port for one in listeners({os.getpid()})} == before
    assert first.port != second.port
    for store in (first, second):
        join_group_store("127.0.0.1", store.port, 30.0).set("key", str(store.port))
    assert [store.get("key") for store in (first, second)] == [str(store.port).encode() for store in (first, second)]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
