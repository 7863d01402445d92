"""The executor `broadcast`: one group of a source and all ranks of its engines, one flat broadcast a bucket.

The group is NCCL or gloo (which also takes CUDA tensors), stays from push to push, and is made anew when an engine has
started again. It is outside the trainer's default group.

The threads of a push are here, too. Each sets its GPU first: in torch a new thread uses the process's first one, and
streams, NCCL and CUDA IPC would take another rank's.
"""

import inspect
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fusionrl.base.group_stores import MIXED_GROUP, PUSH_GROUP, attend, call_off, connecting, create_group_store, meet
from fusionrl.plan.push_plan import EngineTarget
from fusionrl.weights.remote_calls import Reference, future_of, wait_all

logger = logging.getLogger(__name__)

_CALL_OFF_S = 5.0  # for the run's own engines to notice that a meeting is called off


class Broadcast:
    """One source's part of a push by broadcasts."""

    def __init__(self, backend: str, host: str, timeout_s: float, device: torch.device) -> None:
        """`host` is this node's address, which the engines reach; `device` has what is sent."""
        self.backend, self.host, self.timeout_s, self.device = backend, host, timeout_s, device
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._targets: tuple[EngineTarget, ...] = ()

    @property
    def external_engines(self) -> set[int]:
        """Return the numbers of the external engines in the group."""
        return {target.index for target in self._targets if target.host}

    def connect(self, targets: Sequence[EngineTarget]) -> None:
        """Form the group, unless the one of the last push still fits.

        Not for two sources at a time: engines that met the requests in different orders would wait for each other.
        """
        if self._group is not None and [t.process for t in self._targets] == [t.process for t in targets]:
            self._targets = tuple(targets)
            return
        self.close()
        # They are announced before they have joined.
        external = [target for target in targets if target.host]
        calls: list[tuple[str, Future[Any] | Reference[Any]]] = []
        faults = wait_all([(f"engine {one.index}", one.handle.fault.remote()) for one in external], self.timeout_s)
        for target, fault in zip(external, faults, strict=True):
            if fault is not None:
                raise RuntimeError(f"engine {target.index}: {fault}")
        world_size = 1 + sum(target.tp_size for target in targets)
        hosts = sorted({target.host for target in targets} - {""})
        peers = {address for target in targets for address in target.addresses}
        self._store = create_group_store(self.host, self.timeout_s, hosts, sorted(peers))
        kind = MIXED_GROUP if hosts else PUSH_GROUP
        self._name, self._targets = f"{kind}{uuid.uuid4().hex[:8]}", tuple(targets)
        offset = 1
        for target in targets:
            call = target.handle.init_weights_update_group.remote(
                master_address=self.host,
                master_port=self._store.port,
                rank_offset=offset,
                world_size=world_size,
                group_name=self._name,
                backend=self.backend,
            )
            calls.append((f"engine {target.index}: joining the group", call))
            for rank in range(offset, offset + target.tp_size) if target.host else ():
                attend(self._store, rank)
            offset += target.tp_size
        # In a thread: an engine that refuses never joins, and its answer must end the wait, not the time limit.
        joined = in_thread(
            self.device, init_external_group, self.backend, self._store, world_size, 0, self._name, self.timeout_s
        )
        try:
            wait_all([*calls, ("this rank: joining the group", joined)], self.timeout_s)
        except RuntimeError as error:
            call_off(self._store, str(error))  # or the engines that did not refuse would wait for the one that did
            own_calls = [call for (_, call), target in zip(calls, targets, strict=True) if not target.host]
            wait([future_of(call) for call in own_calls], _CALL_OFF_S)
            # External engines get no notice: they wait at the store, which ends with its last reference.
            del self._store
            joined.add_done_callback(self._leave_late)
            raise
        self._group = joined.result()

    def _leave_late(self, joined: Future[dist.ProcessGroup]) -> None:
        """Leave a group that became complete although an engine failed: the others would wait in it."""
        if joined.exception() is None:
            start_thread(self.device, _leave, joined.result())

    def send(
        self, named: Sequence[tuple[str, Tensor]], flat: Tensor, stamp: Mapping[str, object], timeout_s: float
    ) -> int:
        """Send `named`, which lie one after another in the bytes of `flat`; return when the engines have answered.

        Returns the number of calls.
        """
        assert self._group is not None
        payload = {
            "names": [name for name, _ in named],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "group_name": self._name,
            "load_format": "flattened_bucket",
        }
        calls = [
            (f"engine {target.index}", target.handle.update_weights_from_distributed.remote(**payload, **stamp))
            for target in self._targets
        ]
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        try:
            # An engine answers when it has the bytes; one that refuses never joins the broadcast: its answer ends this.
            wait_all(calls, timeout_s)
            work.wait()
        finally:
            # It holds the connections to the engines, and an error's traceback would hold it: an engine that still
            # waits for bytes is let go when they close.
            del work
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # the buffer is written again
        return len(calls)

    def close(self) -> None:
        """Leave the group, and let the engines leave it, which ends a broadcast that is still under way."""
        if self._group is None:
            return
        for target in self._targets:
            target.handle.destroy_weights_update_group.remote(self._name)
        # gloo waits here for what is under way, until the engines have closed their connections.
        start_thread(self.device, _leave, self._group)
        self._group, self._targets = None, ()


def _leave(group: dist.ProcessGroup) -> None:
    """Leave the group. NCCL's is aborted: a broadcast that an engine never joined would not end."""
    if dist.get_backend(group) == "nccl":
        c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def init_external_group(
    backend: str, store: dist.Store, world_size: int, rank: int, group_name: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join the group `group_name`; blocks until all `world_size` ranks have. Its communicator is there afterwards.

    On the engine's side, `/init_weights_update_group`, every rank opens the store at the given address, puts the
    group's name as a prefix before its keys, and makes a group from it with torch's constructor. torch has no public
    call for a second, independent group, so both sides use the constructor behind `init_process_group`.

    `store` is the one that `fusionrl.base.group_stores.create_group_store` made on rank 0. `timeout_s` bounds the
    meeting, which may be called off (`fusionrl.base.group_stores`), and every later collective.
    """
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    meet(store, rank, world_size, timeout_s)
    # torch 2.6 renamed the argument.
    parameters = inspect.signature(c10d._new_process_group_helper).parameters
    options = "backend_options" if "backend_options" in parameters else "pg_options"
    group, _ = connecting(c10d._new_process_group_helper)(
        world_size,
        rank,
        [],  # no ranks of a default group: the group stands alone
        c10d.Backend(backend),
        dist.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
        **{options: None},
    )
    # Collectives translate a global rank into the group's; here they are the same.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


P = ParamSpec("P")
T = TypeVar("T")


def start_thread(
    device: torch.device, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> threading.Thread:
    """Call `function` in a thread that works on `device` and does not keep the process alive."""

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        function(*args, **kwargs)

    thread = threading.Thread(target=run, name="weight-push", daemon=True)
    thread.start()
    return thread


def in_thread(device: torch.device, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Start such a call; return its future, which may stay unread."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(function(*args, **kwargs))
        except BaseException as error:  # handed over to the thread that asks for the result
            logger.debug("in a thread of a push", exc_info=True)
            # Its traceback holds this frame, and so the arguments: a store that ends with its last reference.
            answer.set_exception(error.with_traceback(None))

    start_thread(device, run)
    return answer
