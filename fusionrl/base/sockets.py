"""Interfaces that collectives take, folders that sockets fit in, and messages between a process and its helper."""

import logging
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Mapping
from typing import Any

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interface_of(host: str) -> str | None:
    """Name of the local network interface that has the address `host` ("lo" for 127.0.0.1); None if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == host for address in addresses):
            return name
    return None


def collective_interfaces(host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which gloo and NCCL take the interface of `host`, an address of this node.

    On loopback nothing may leave the machine: gloo takes it whatever the user's value, and NCCL finds its way. On a
    network what the node's environment says stays. Empty where no interface has the address (a node behind another
    address than its own): the libraries then choose.
    """
    interface = interface_of(host)
    if interface is None:
        return {}
    if host.startswith("127.") or host == "::1":
        return {GLOO: interface}
    # "=" asks NCCL for this name, and not for all that begin with it (eth1, eth10).
    values = {GLOO: interface, NCCL: f"={interface}"}
    return {name: value for name, value in values.items() if not environ.get(name)}


logger = logging.getLogger(__name__)


def socket_folder(max_bytes: int, purpose: str, variable: str = "TMPDIR") -> str:
    """Return the folder that `variable` names, the usual temporary one without it, or /tmp if sockets cannot be there.

    max_bytes  of its path; a socket's whole path has 107 at most
    purpose    what is put there, for the warning about /tmp
    """
    name = variable if os.environ.get(variable) else "TMPDIR"
    folder = os.environ.get(variable) or tempfile.gettempdir()
    size = len(os.fsencode(folder))
    if size > max_bytes:
        why = f"sockets leave it at most {max_bytes} characters, it has {size}"
    elif not folder.isascii() or any(character.isspace() for character in folder):
        why = "paths of sockets are ASCII without white space"
    else:
        return folder
    logger.warning("%s=%s is not used: %s; %s in /tmp", name, folder, why, purpose)
    return "/tmp"


LENGTH = struct.Struct("!Q")


def frame(message: object) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message)
    return LENGTH.pack(len(data)) + data


def receive(connection: socket.socket) -> Any:
    """The next message of a blocking connection. Raises EOFError if the other end has closed it."""
    (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size))
    return pickle.loads(receive_exactly(connection, length))


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes of a blocking connection. Raises EOFError if the other end has closed it."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


_SILENCE_S = 30  # of a connection's other end, before it counts as gone


def notice_silence(connection: socket.socket) -> None:
    """Let a TCP connection break half a minute after its other end is gone without a word: a node without power, a
    network that drops everything. The kernel of a process that is busy, or stopped, still answers, until what it has
    not read fills its buffer: half a minute after that, too, the connection breaks.

    Linux would wait for an answer for ever, and a quarter of an hour for what was sent to arrive.
    """
    for option in silence_options():
        connection.setsockopt(*option)


def silence_options() -> list[tuple[int, int, int]]:
    """Return the options that `notice_silence` sets, for a library that makes its sockets itself."""
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 6),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S),
    ]


def noticing_socket(address: tuple[Any, ...]) -> socket.socket:
    """Make the socket of a connection to an address of `getaddrinfo`; see `notice_silence`. For aiohttp's connector."""
    connection = socket.socket(*address[:3])
    notice_silence(connection)
    return connection
