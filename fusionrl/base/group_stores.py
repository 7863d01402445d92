"""torch's stores, in which the members of a process group find each other: closed to strangers, and no wait for ever.

A TCPStore requires no key, and by itself it listens on every address of the machine. So, where all processes of a run
are on one machine, a store is a file in a folder that this user alone can read (`FOLDER_VARIABLE`). On several nodes a
TCPStore is bound to its node's address, and the kernel drops connections from addresses outside of the cluster
(`PEERS_VARIABLE`). A process group's constructor (gloo) or first collective (NCCL) blocks until all members are there,
up to half an hour, and a blocked SGLang scheduler answers nothing. So members of a weight push first `meet` in the
store, where the meeting can be called off. Engines that others have started know nothing of meetings: the trainer
attends for them, and the run's own members look for the end also inside gloo's constructor (`RevocableStore`).
"""

import ctypes
import functools
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

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


def create_group_store(
    host: str, timeout_s: float, guests: Sequence[str] = (), peers: Sequence[str] = ()
) -> FileStore | dist.TCPStore:
    """A new store, which others join by `host` and its attribute `port`; it lives as long as this process.

    `host` is this node's address; `guests` are addresses of processes outside of the run that join as well: they do not
    see the folder of the run's stores. `peers` are addresses of nodes that may have joined since this process started.
    Raises OSError if the folder of stores is gone, or the address cannot be bound.
    """
    timeout = timedelta(seconds=timeout_s)
    if (folder := os.environ.get(FOLDER_VARIABLE)) is not None and not guests:
        number = _new_number(Path(folder))
        store = FileStore(str(Path(folder, str(number))), -1)
        store.port = number
        store.set_timeout(timeout)
        return store
    return _listening_store(host, 0, timeout, [*guests, *peers])


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
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
    program = struct.pack("HP", len(code), ctypes.addressof(instructions))  # struct sock_fprog
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        logger.warning("the stores of process groups take connections from everywhere: no socket filter (%s)", error)


PUSH_GROUP = "fusionrl-push-"
"""How the names of the groups begin whose communicator is made at once, on all sides."""
MIXED_GROUP = "fusionrl-mixed-"
"""The same for groups with engines that others have started: SGLang makes the communicator with the first broadcast."""

_POLL_S = 0.02
_CONNECTS = "fusionrl_connects"
_OFF, _LIMIT = "meeting-off", "meeting-limit"

R = TypeVar("R")


class CalledOff(RuntimeError):
    """The meeting will not take place; says why."""


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Say that `rank` is there, and return when all members are.

    Rank 0's limit holds for all, as an engine's own is half an hour.

    Raises:
        CalledOff: another member has called off the meeting.
        RuntimeError: not all came in time; names those that did not.
    """
    members = [f"meeting-{member}" for member in range(world_size)]
    if rank == 0:
        store.set(_LIMIT, repr(timeout_s))
    store.set(members[rank], "")
    start, has_limit = time.monotonic(), rank == 0
    while not store.check(members):
        _raise_if_off(store)
        if not has_limit and store.check([_LIMIT]):
            timeout_s, has_limit = float(store.get(_LIMIT)), True
        if time.monotonic() - start > timeout_s:
            absent = [str(member) for member, key in enumerate(members) if not store.check([key])]
            raise RuntimeError(
                f"the group for a weight push: its ranks {', '.join(absent)} did not come within {timeout_s:.0f} s"
                " (--update-weight-timeout-s)"
            )
        time.sleep(_POLL_S)


def _raise_if_off(store: dist.Store) -> None:
    if store.check([_OFF]):
        raise CalledOff(f"the group for a weight push is called off: {store.get(_OFF).decode()}")


class RevocableStore(dist.Store):
    """Another store, whose waits end early: `check` raises once a wait is pointless, and a wait takes `limit_s` seconds
    at most. Whoever makes a group of it keeps it as long as the group."""

    def __init__(self, store: dist.Store, check: Callable[[], None], limit_s: float) -> None:
        super().__init__()
        self._store, self._check, self._limit_s = store, check, limit_s

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys. The group's own time limit, `timeout`, is not what counts. Raises RuntimeError if `check`
        raised one, or the keys did not come in time."""
        start = time.monotonic()
        while not self._store.check(list(keys)):
            self._check()
            if time.monotonic() - start > self._limit_s:
                raise RuntimeError(
                    f"the group for a weight push: not all of its ranks joined within {self._limit_s:.0f} s"
                    " (--update-weight-timeout-s)"
                )
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return self._store.multi_get(list(keys))


def _passed_on(name: str) -> Callable[..., object]:
    return lambda self, *args: getattr(self._store, name)(*args)


for _name in (  # torch looks for each of these in the class
    *("set", "multi_set", "append", "add", "compare_set"),
    *("check", "delete_key", "num_keys", "has_extended_api"),
):
    setattr(RevocableStore, _name, _passed_on(_name))


def attend(store: dist.Store, rank: int) -> None:
    """Say that `rank` is there in its place: an engine that others have started knows nothing of meetings."""
    store.set(f"meeting-{rank}", "")


def call_off(store: dist.Store, reason: str) -> None:
    """Let all go who wait in `meet`, or in the constructor of the group."""
    store.set(_OFF, reason)


def connect(group: dist.ProcessGroup) -> None:
    """Make NCCL's communicator of `group` for this thread's GPU; blocks until all members do. Nothing for gloo."""
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    backend = group._get_backend(device)
    if backend.name() == "nccl":
        backend.eager_connect_single_device(device)


def connecting(make_group: Callable[..., tuple[dist.ProcessGroup, R]]) -> Callable[..., tuple[dist.ProcessGroup, R]]:
    """Return torch's constructor of groups, which connects those of a weight push at once; while it waits for members
    by gloo, it can be called off. Idempotent."""
    if hasattr(make_group, _CONNECTS):  # torch's own may be wrapped, too
        return make_group

    @functools.wraps(make_group)
    def make_and_connect(*args: object, **kwargs: object) -> tuple[dist.ProcessGroup, R]:
        name = str(kwargs.get("group_name", ""))
        if name.startswith((PUSH_GROUP, MIXED_GROUP)) and args[_BACKEND:] and str(args[_BACKEND]) == "gloo":
            args, kwargs = _revocable(name, args, kwargs)
        try:
            group, store = make_group(*args, **kwargs)
        except BaseException:
            _kept.pop(name, None)  # dropping the last reference ends the store and the waits of unreachable members
            raise
        if name.startswith(PUSH_GROUP):
            connect(group)
        return group, store

    setattr(make_and_connect, _CONNECTS, True)
    return make_and_connect


# Positional arguments of torch's constructor.
_BACKEND, _STORE = 3, 4
_kept: dict[str, RevocableStore] = {}  # of groups that live, by name: torch holds only the C++ half of such a store


def _revocable(
    name: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments with a store whose waits can be called off, and with rank 0's limit: an engine's own is half an
    hour, also for the connections to members that have said where they are."""
    store = args[_STORE]
    assert isinstance(store, dist.Store)
    signals = store.underlying_store if isinstance(store, dist.PrefixStore) else store
    limit_s = float(signals.get(_LIMIT)) if signals.check([_LIMIT]) else c10d.default_pg_timeout.total_seconds()
    for gone in _kept.keys() - set(c10d._world.pg_names.values()):
        del _kept[gone]
    _kept[name] = RevocableStore(store, functools.partial(_raise_if_off, signals), limit_s)
    return (*args[:_STORE], _kept[name], *args[_STORE + 1 :]), kwargs | {"timeout": timedelta(seconds=limit_s)}
