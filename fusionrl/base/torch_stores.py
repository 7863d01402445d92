"""torch's stores, by which the members of a process group find each other, closed to strangers.

A TCPStore requires no key, and by itself it listens on every address of the machine. So, where all processes of a run
are on one machine, a store is a file in a folder that this user alone can read (`FOLDER_VARIABLE`). On several nodes a
TCPStore is bound to its node's address in the cluster, and the kernel drops connections from addresses outside of it
(`PEERS_VARIABLE`). Who can run programs on a node can still connect.
"""

import ctypes
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fusionrl.base.environment import FOLDER_VARIABLE, PEERS_VARIABLE

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_MAX_NUMBER = 32767  # below the ports that the kernel gives away: no port of a server has the number of a file
# Classic BPF, linux/filter.h: load a word, jump if equal, return.
_LOAD_WORD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_SOURCE_ADDRESS = 0xFFF00000 + 12  # SKF_NET_OFF: the IPv4 header, not TCP's

logger = logging.getLogger(__name__)


class FileStore(dist.FileStore):
    """A store in a file; `port` is its number, which replaces a port in a group's address."""

    port: int


def create_group_store(host: str, timeout_s: float, guests: Sequence[str] = ()) -> FileStore | dist.TCPStore:
    """A new store, which others join by `host` and its attribute `port`; it lives as long as this process.

    `host` is this node's address; `guests` are addresses of processes outside of the run that join as well: they do not
    see the folder of the run's stores. Raises OSError if the folder of stores is gone, or the address cannot be bound.
    """
    timeout = timedelta(seconds=timeout_s)
    if (folder := os.environ.get(FOLDER_VARIABLE)) is not None and not guests:
        number = _new_number(Path(folder))
        store = FileStore(str(Path(folder, str(number))), -1)
        store.port = number
        store.set_timeout(timeout)
        return store
    return _listening_store(host, 0, timeout, guests)


def join_group_store(host: str, port: int, timeout_s: float) -> dist.Store:
    """The store that `create_group_store` made, in this process or another."""
    timeout = timedelta(seconds=timeout_s)
    if (folder := os.environ.get(FOLDER_VARIABLE)) is not None and Path(folder, str(port)).exists():
        store = dist.FileStore(str(Path(folder, str(port))), -1)
        store.set_timeout(timeout)
        return store
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def engine_store(host: str, port: int, timeout_s: float, *, is_master: bool) -> dist.TCPStore:
    """The store at `host:port` in which the ranks of an engine over several nodes meet; the master makes it.

    The port is one that a server of the engine has reserved (`fusionrl.engines.process`). Raises OSError if the master
    cannot bind the address.
    """
    timeout = timedelta(seconds=timeout_s)
    if not is_master:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return _listening_store(host, port, timeout)


def _new_number(folder: Path) -> int:
    while True:
        number = 1 + secrets.randbelow(_MAX_NUMBER)
        try:
            os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return number
        except FileExistsError:
            continue


def _listening_store(host: str, port: int, timeout: timedelta, guests: Sequence[str] = ()) -> dist.TCPStore:
    with _bound_socket(host, port, guests) as listener:
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),  # torch's own socket would listen on every address
        )


def _bound_socket(host: str, port: int = 0, guests: Sequence[str] = ()) -> socket.socket:
    """A socket on a free port of `host`, or on a reserved one, that takes connections from this node,
    `PEERS_VARIABLE`'s and guests alone."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET:
            refuse_others(listener, [host, *guests, *filter(None, os.environ.get(PEERS_VARIABLE, "").split(","))])
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def refuse_others(listener: socket.socket, addresses: Sequence[str]) -> None:
    """Let the kernel drop every packet to an IPv4 socket, and to what it accepts, that is from none of `addresses`.

    A name is resolved. Where the kernel takes no filter, a warning says so.
    """
    allowed = sorted({socket.gethostbyname(address) for address in addresses})
    # At most 254 comparisons can jump to the end; a larger cluster is left to the address that the socket is bound to.
    if len(allowed) > 250:
        logger.warning("%d nodes: the stores of process groups take connections from everywhere", len(allowed))
        return
    code = [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS)]
    for index, address in enumerate(allowed):
        (number,) = struct.unpack("!I", socket.inet_aton(address))
        code.append((_JUMP_EQUAL, len(allowed) - index, 0, number))
    code += [(_RETURN, 0, 0, 0), (_RETURN, 0, 0, 0xFFFFFFFF)]
    instructions = (_Instruction * len(code))(*(_Instruction(*instruction) for instruction in code))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(_Program(len(code), instructions)))
    except OSError as error:
        logger.warning("the stores of process groups take connections from everywhere: no socket filter (%s)", error)
