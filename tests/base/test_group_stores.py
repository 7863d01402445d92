"""Stores of process groups are closed to strangers, and no member waits for a missing one for ever."""

import functools
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusionrl.base import group_stores
from fusionrl.base.environment import FOLDER_VARIABLE, PEERS_VARIABLE
from fusionrl.base.group_stores import (
    MIXED_GROUP,
    PUSH_GROUP,
    CalledOff,
    attend,
    call_off,
    connecting,
    create_group_store,
    join_group_store,
    meet,
)
from fusionrl.engines.process import PortReservation
from fusionrl.engines.server_patches import install_rendezvous
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
    store = create_group_store("127.0.0.1", 30.0, peers=["127.0.0.251"])  # a node that has joined since
    assert _connects(store.port, "127.0.0.7") and _connects(store.port, "127.0.0.251")
    assert not _connects(store.port, "127.0.0.252")


def test_on_one_machine_nothing_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A number replaces a port; each store has its own, in a file that no other user can read."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    before = {one.port for one in listeners({os.getpid()})}
    first, second = (create_group_store("127.0.0.1", 30.0) for _ in range(2))
    assert {one.port for one in listeners({os.getpid()})} == before
    assert first.port != second.port
    for store in (first, second):
        join_group_store("127.0.0.1", store.port, 30.0).set("key", str(store.port))
    assert [store.get("key") for store in (first, second)] == [str(store.port).encode() for store in (first, second)]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


HOST, LONG_S = "127.0.0.1", 1800.0


@pytest.fixture
def tcp_store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Rank 0's; the others join it."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    return create_group_store(HOST, 30.0)


@pytest.fixture(params=["file", "tcp"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dist.Store:
    if request.param == "tcp":
        return request.getfixturevalue("tcp_store")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return create_group_store(HOST, 30.0)


def joined(store: dist.Store) -> dist.Store:
    return join_group_store(HOST, store.port, 30.0)  # type: ignore[attr-defined]


def test_all_come(store: dist.Store) -> None:
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(meet, joined(store), rank, 3, LONG_S) for rank in (1, 2)]
        assert not any(other.done() for other in others)
        meet(store, 0, 3, 30.0)
        assert [other.result(10) for other in others] == [None, None]


@pytest.mark.parametrize("is_called_off", [True, False])
def test_a_meeting_that_is_called_off_or_takes_as_long_as_rank_0_allows(store: dist.Store, is_called_off: bool) -> None:
    """An engine whose neighbour refuses is free at once, and not after half an hour."""
    kind, text = RuntimeError, r"ranks 2, 3 did not come within 0 s \(--update-weight-timeout-s\)"
    with ThreadPoolExecutor(2) as pool:
        limit_s = LONG_S if is_called_off else 0.2
        waiting = [pool.submit(meet, joined(store), 1, 4, LONG_S), pool.submit(meet, joined(store), 0, 4, limit_s)]
        if is_called_off:
            time.sleep(0.1)
            call_off(store, "engine 1: no group today")
            kind, text = CalledOff, "engine 1: no group today"
        for one in waiting:
            with pytest.raises(kind, match=text):
                one.result(10)


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer with the store has died."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    store = create_group_store(HOST, 30.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, joined(store), 1, 2, LONG_S)
        time.sleep(0.1)
        del store
        with pytest.raises(RuntimeError):
            waiting.result(10)


def made_group(store: dist.Store, name: str, rank: int, world_size: int) -> dist.ProcessGroup:
    """A gloo group, with half an hour for its ranks to come, as SGLang makes it."""
    group, _ = connecting(c10d._new_process_group_helper)(
        *(world_size, rank, [], c10d.Backend("gloo"), dist.PrefixStore(name, store)),
        group_name=name,
        timeout=timedelta(seconds=LONG_S),
        backend_options=None,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


@pytest.mark.parametrize("kind", [PUSH_GROUP, MIXED_GROUP])
def test_a_group_is_called_off_while_it_waits_in_gloo(kind: str, store: dist.Store) -> None:
    """A guest that dies after it was said to be there: the others sat in gloo's constructor for half an hour."""

    def join(own: dist.Store, rank: int) -> None:
        meet(own, rank, 3, 600.0)
        made_group(own, f"{kind}a", rank, 3)

    attend(store, 2)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(join, joined(store), rank) for rank in (0, 1)]
        time.sleep(0.2)
        assert not any(one.done() for one in waiting)
        call_off(store, "engine 5 is dead")
        for one in waiting:
            with pytest.raises(RuntimeError, match="engine 5 is dead"):
                one.result(10)
    assert not group_stores._kept


def test_rank_0s_limit_holds_in_gloo_too(store: dist.Store) -> None:
    attend(store, 1)
    with ThreadPoolExecutor(1) as pool:

        def join() -> None:
            meet(store, 0, 2, 0.3)
            made_group(store, f"{MIXED_GROUP}b", 0, 2)

        with pytest.raises(RuntimeError, match=r"not all of its ranks joined within 0 s \(--update-weight-timeout-s\)"):
            pool.submit(join).result(20)


GUEST = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from torch.distributed import distributed_c10d as c10d
host, port, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False, wait_for_workers=False))
group, _ = c10d._new_process_group_helper(
    2, 1, [], c10d.Backend("gloo"), store, group_name=name, timeout=timedelta(seconds=60), backend_options=None
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
found = torch.zeros(4)
dist.broadcast(found, src=0, group=group)
assert found.tolist() == [0, 1, 2, 3], found
os._exit(0)  # gloo's threads, still alive at an exit, abort the process now and then
"""


def test_a_guest_that_knows_only_torch_joins_and_gets_every_byte(tcp_store: Any) -> None:
    """Its store is torch's own, ours can be called off: both lay their keys out in the same way."""
    store, name = tcp_store, f"{MIXED_GROUP}c"
    guest = subprocess.Popen([sys.executable, "-c", GUEST, HOST, str(store.port), name])
    try:
        attend(store, 1)
        meet(store, 0, 2, 60.0)
        group = made_group(store, name, 0, 2)
        assert list(group_stores._kept) == [name]
        dist.broadcast(torch.arange(4.0), src=0, group=group)
        assert guest.wait(60) == 0
        dist.destroy_process_group(group)
    finally:
        guest.kill()
        guest.wait()


@pytest.mark.parametrize(("backend", "is_connected"), [("nccl", True), ("gloo", False)])
def test_nccl_is_connected_at_once(backend: str, is_connected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU of the thread that makes the group."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    made = SimpleNamespace(name=lambda: backend, eager_connect_single_device=found.append)
    group_stores.connect(SimpleNamespace(_get_backend=lambda device: made))  # type: ignore[arg-type]
    assert found == ([torch.device("cuda", 3)] if is_connected else [])


def test_sglang_makes_its_groups_by_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides connect groups of a weight push, and no others: one that connects alone would wait for ever."""
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    monkeypatch.setitem(handlers, "tcp", handlers["tcp"])
    monkeypatch.setattr(c10d, "_new_process_group_helper", c10d._new_process_group_helper)
    connected: list[str] = []
    monkeypatch.setattr(group_stores, "connect", lambda group: connected.append(group.group_name))
    install_rendezvous()
    once = c10d._new_process_group_helper
    install_rendezvous()
    assert c10d._new_process_group_helper is once, "wrapped twice, a group would be connected twice"
    for name in (f"{PUSH_GROUP}a", "of-sglang-b"):
        arguments = 1, 0, [], c10d.Backend("gloo"), dist.HashStore()
        group, _ = once(*arguments, group_name=name, timeout=c10d.default_pg_timeout, backend_options=None)
        c10d._world.pg_group_ranks[group] = {0: 0}
        dist.destroy_process_group(group)
    assert connected == [f"{PUSH_GROUP}a"]
    of_torch = functools.wraps(once)(lambda *_, group_name: (SimpleNamespace(group_name=group_name), None))
    of_torch.__dict__.clear()  # torch may wrap its own function
    made = connecting(of_torch)
    made(group_name=f"{PUSH_GROUP}c")
    assert connected == [f"{PUSH_GROUP}a", f"{PUSH_GROUP}c"] and connecting(made) is made
