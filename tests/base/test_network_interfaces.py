"""The interface of collectives: looked up by the process that uses it, on its own node."""

import os
import socket

import psutil
import pytest

from fusionrl.base.sockets import GLOO, NCCL, collective_interfaces, interface_of
from fusionrl.runtime import actor_process
from fusionrl.runtime.actor_process import ProcessSettings

OTHER_NODE = "203.0.113.77"


def network() -> tuple[str, str]:
    """An address of this machine that is not on loopback, and its interface."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address, name
    pytest.skip("this machine has no network")


def test_interfaces_of_addresses() -> None:
    address, name = network()
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of(address) == name
    assert interface_of(OTHER_NODE) is None


def test_what_the_node_says_stays_but_for_loopback() -> None:
    address, name = network()
    assert collective_interfaces(address, {}) == {GLOO: name, NCCL: f"={name}"}
    assert collective_interfaces(address, {NCCL: "bond0", GLOO: ""}) == {GLOO: name}
    assert collective_interfaces("127.0.0.1", {GLOO: "eth0"}) == {GLOO: interface_of("127.0.0.1")}
    assert collective_interfaces(OTHER_NODE, {}) == {}


def test_an_actor_settles_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver knows the address of the actor's node, and not the name of its interface there."""
    address, name = network()
    environ = {key: value for key, value in os.environ.items() if key not in (GLOO, NCCL)}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(actor_process, "take_secrets", lambda secrets: None)
    before = os.umask(0o077)
    ProcessSettings(before, host=address).apply()
    assert {key: environ[key] for key in (GLOO, NCCL)} == {GLOO: name, NCCL: f"={name}"}
