"""Members of a group for a weight push meet before they make it, so that a missing one blocks no other.

A process group's constructor (gloo) or its first collective (NCCL) blocks until all members are there, up to limits of
half an hour, and an SGLang scheduler that is blocked answers nothing. So the members first meet in the group's store,
where a meeting can be called off. NCCL's communicator is then made at once (`connect`), before engines are paused.

Engines that others have started know nothing of meetings: the trainer says of them that they are there. If one of them
then dies, the others wait inside gloo's constructor; so the run's own members look there, too (`RevocableStore`).
"""

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

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
