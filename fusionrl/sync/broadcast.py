"""The executor `broadcast`: one group of a source and all ranks of its engines, one flat broadcast a bucket.

The group is NCCL or gloo (which also takes CUDA tensors), stays from push to push, and is made anew when an engine has
started again.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fusionrl.base.stores import create_group_store
from fusionrl.plan.push import EngineTarget
from fusionrl.sync.calls import wait_all
from fusionrl.sync.group import init_external_group

T = TypeVar("T")


class Broadcast:
    """One source's part of a push by broadcasts."""

    def __init__(self, backend: str, host: str, timeout_s: float) -> None:
        """`host` is this node's address, which the engines reach."""
        self.backend, self.host, self.timeout_s = backend, host, timeout_s
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._targets: tuple[EngineTarget, ...] = ()

    def connect(self, targets: Sequence[EngineTarget]) -> None:
        """Form the group, unless the one of the last push still fits.

        Not for two sources at a time: engines that met the requests in different orders would wait for each other.
        """
        if self._group is not None and _processes(self._targets) == _processes(targets):
            self._targets = tuple(targets)
            return
        self.close()
        world_size = 1 + sum(target.tp_size for target in targets)
        self._store = create_group_store(self.host, self.timeout_s)
        self._name, self._targets = f"fusionrl-push-{uuid.uuid4().hex[:8]}", tuple(targets)
        offset, calls = 1, []
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
            offset += target.tp_size
        # In a thread: an engine that refuses never joins, and its answer must end the wait, not the time limit.
        joined = _InThread(self._join, world_size)
        wait_all(calls, self.timeout_s)
        self._group = joined.result(self.timeout_s)

    def _join(self, world_size: int) -> dist.ProcessGroup:
        store = self._store
        return init_external_group(
            self.backend, self.host, store.port, world_size, 0, self._name, self.timeout_s, store=store
        )

    def send(
        self, named: Sequence[tuple[str, Tensor]], flat: Tensor, stamp: Mapping[str, object], timeout_s: float
    ) -> int:
        """Send `named`, which lie one after another in the bytes of `flat`; return when the engines have answered.

        Returns the number of calls.

        Raises:
            RuntimeError: an engine refused or died; names it.
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
        # An engine answers when it has the bytes; one that refuses never joins the broadcast, and its answer ends this.
        wait_all(calls, timeout_s)
        work.wait()
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
        threading.Thread(target=dist.destroy_process_group, args=[self._group], daemon=True).start()
        self._group, self._targets = None, ()


def _processes(targets: Sequence[EngineTarget]) -> list[tuple[int, int]]:
    return [(target.index, target.num_restarts) for target in targets]


class _InThread(Generic[T]):
    """A call in a thread that nobody has to wait for."""

    def __init__(self, function: Callable[..., T], *args: object) -> None:
        self._answer: list[T] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., T], *args: object) -> None:
        try:
            self._answer.append(function(*args))
        except BaseException as error:  # handed over to the thread that asks for the result
            self._error.append(error)

    def result(self, timeout_s: float) -> T:
        self._thread.join(timeout_s)
        if self._error:
            raise self._error[0]
        if not self._answer:
            raise RuntimeError(f"no answer within {timeout_s:.0f} s")
        return self._answer[0]
