"""The trainers' half of a weight push: bytes from trainer memory to the engines.

Two executors share the buckets of `plan.buckets`:

broadcast  rank 0 and every engine rank form one group (NCCL or gloo); each bucket is one flat broadcast.
ipc        CUDA: each engine rank maps the memory of the trainer rank on its own GPU (CUDA IPC). CPU: a shared-memory
           segment on the same node, or the bytes by value to another node.

Pausing, version and release are the protocol's business (`fusionrl.weights.push`), which runs in the driver.
"""

from __future__ import annotations

import io
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pybase64
import ray
import torch
import torch.distributed as dist

from fusionrl.engines.payload import SharedTensors, by_value
from fusionrl.weights.group import create_group_store, init_external_group
from fusionrl.weights.plan import EngineTarget, Feed, buckets

NamedTensors = list[tuple[str, torch.Tensor]]
_POLL_S = 0.05


class WeightSender:
    """One trainer rank's sender. All ranks call `send` together: the export may gather over them."""

    def __init__(
        self,
        *,
        rank: int,
        device: str,
        backend: str,
        host: str,
        export: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        buffer_size: int,
        timeout_s: float,
        object_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`export` yields (Hugging Face name, full tensor) in the engines' precision, in one order on all ranks; `host`
        is this node's address for the broadcast group; `object_group` is a gloo group over all trainer ranks."""
        self.rank, self.device, self.backend, self.host = rank, device, backend, host
        self.export = export
        self.buffer_size, self.timeout_s = buffer_size, timeout_s
        self.object_group = object_group
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._group_targets: tuple[tuple[int, int], ...] = ()  # (index, num_restarts)
        self._segments: dict[int, SharedTensors] = {}

    def send(
        self, targets: Sequence[EngineTarget], feeds: Sequence[Feed], version: int, transport: str
    ) -> dict[str, Any]:
        """Send every tensor once to every engine. Returns bytes and number of buckets.

        Raises:
            RuntimeError: an engine refused or died, or the group did not move within the time limit.
        """
        num_bytes = num_buckets = 0
        failure: Exception | None = None
        try:
            for bucket, is_last in _with_last(buckets(self.export(), self.buffer_size)):
                stamp = {"version": str(version) if is_last else None, "flush_cache": is_last}
                # A rank that has failed goes on with the export alone, in which the other ranks may wait for it.
                try:
                    if transport == "ipc":
                        self._ipc(targets, feeds, num_buckets, bucket, stamp, is_silent=failure is not None)
                    elif self.rank == 0 and failure is None:
                        self._connect(targets)
                        self._broadcast(targets, bucket, stamp)
                except Exception as error:  # whatever an engine's failure looks like here; raised at the end
                    failure = error
                num_buckets += 1
                num_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
            if failure is not None:
                raise failure
        except BaseException:
            self.disconnect()
            raise
        return {"bytes": num_bytes, "buckets": num_buckets}

    # ------------------------------------------------------------------------------------ broadcast
    def _connect(self, targets: Sequence[EngineTarget]) -> None:
        """Form the group of this rank and every engine rank, unless the one of the last push still fits."""
        wanted = tuple((target.index, target.num_restarts) for target in targets)
        if self._group is not None and self._group_targets == wanted:
            return
        self.disconnect()
        world_size = 1 + sum(target.tp_size for target in targets)
        store = create_group_store(self.host, self.timeout_s)
        self._group_name = f"fusionrl-push-{uuid.uuid4().hex[:8]}"
        offset, refs = 1, []
        for target in targets:
            refs.append(
                target.handle.init_weights_update_group.remote(
                    master_address=self.host,
                    master_port=store.port,
                    rank_offset=offset,
                    world_size=world_size,
                    group_name=self._group_name,
                    backend=self.backend,
                )
            )
            offset += target.tp_size
        self._group = init_external_group(
            self.backend, self.host, store.port, world_size, 0, self._group_name, self.timeout_s, store=store
        )
        ray.get(refs)
        self._group_targets = wanted
        self._store = store

    def disconnect(self) -> None:
        """Forget the group; the engines leave theirs when the next one is made or they end."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group, self._group_targets = None, ()

    def _broadcast(self, targets: Sequence[EngineTarget], bucket: NamedTensors, stamp: dict[str, Any]) -> None:
        assert self._group is not None
        refs = [
            target.handle.update_weights_from_distributed.remote(
                names=[name for name, _ in bucket],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=self._group_name,
                load_format="flattened_bucket",
                **stamp,
            )
            for target in targets
        ]
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        # An engine that refuses never joins the broadcast: its answer must end the wait, not the time limit.
        while not work.is_completed():
            done, refs = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S) if refs else ([], [])
            ray.get(done)
        work.wait()
        ray.get(refs)

    # ------------------------------------------------------------------------------------ ipc
    def _ipc(
        self,
        targets: Sequence[EngineTarget],
        feeds: Sequence[Feed],
        number: int,
        bucket: NamedTensors,
        stamp: dict[str, Any],
        is_silent: bool,
    ) -> None:
        """`is_silent`: this rank tells the engines nothing more, and only takes part in what is collective."""
        by_index = {target.index: target for target in targets}
        mine = [feed for feed in feeds if self.rank in feed.senders]
        buffer = self._shared(number, bucket, any(not feed.by_value for feed in mine)) if mine else None
        refs = []
        for feed in feeds:
            payloads = self._payloads(feed, bucket, buffer)
            if self.rank == feed.leader and not is_silent:
                handle = by_index[feed.engine].handle
                refs.append(handle.update_weights_from_tensor.remote(payloads, load_format=None, **stamp))
        try:
            ray.get(refs)
        finally:
            if self.device == "cuda":
                # The buffer must outlive every engine's copy of it, also of engines that another rank leads.
                dist.barrier(group=self.object_group)

    def _shared(self, number: int, bucket: NamedTensors, needed: bool) -> Any:
        """Memory that an engine can map: one flat segment with a view for each tensor."""
        if not needed:
            return None
        if self.device == "cuda":
            # Fresh for every bucket: an engine may answer before its copy has ended. One allocation, so that all
            # views travel under one IPC handle.
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
            torch.cuda.synchronize()
            parts = flat.split([tensor.nbytes for _, tensor in bucket])
            return [(name, part.view(t.dtype).view(t.shape)) for (name, t), part in zip(bucket, parts, strict=True)]
        segment = self._segments.get(number)
        if segment is None or list(segment.views) != [name for name, _ in bucket]:
            segment = SharedTensors([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in bucket])
            self._segments[number] = segment
        segment.copy_from(bucket)
        return segment

    def _payloads(self, feed: Feed, bucket: NamedTensors, buffer: Any) -> list[str]:
        """One payload for each rank of the engine; gathered to the leader where several trainer ranks send."""
        own: dict[int, str] = {}
        for engine_rank, sender in enumerate(feed.senders):
            if sender == self.rank:
                own[engine_rank] = _serialize(feed, bucket, buffer)
        if set(feed.senders) == {feed.leader}:
            return [own[i] for i in sorted(own)]
        gathered: list[Any] = [None] * dist.get_world_size(self.object_group)
        dist.all_gather_object(gathered, own, group=self.object_group)
        merged = {rank: payload for part in gathered for rank, payload in part.items()}
        return [merged[i] for i in sorted(merged)]


def _serialize(feed: Feed, bucket: NamedTensors, buffer: Any) -> str:
    if feed.by_value:
        return by_value(bucket)
    if isinstance(buffer, SharedTensors):
        return buffer.payload()
    out = io.BytesIO()
    ForkingPickler(out, pickle.HIGHEST_PROTOCOL).dump(buffer)
    return pybase64.b64encode(out.getvalue()).decode()


def _with_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """(item, whether it is the last), one item ahead of the source."""
    try:
        current = next(items)
    except StopIteration:
        return
    for following in items:
        yield current, False
        current = following
    yield current, True
