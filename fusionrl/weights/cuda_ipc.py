"""The executor `ipc` on GPUs: each engine rank maps the memory of the trainer rank on its own device (CUDA IPC).

Every trainer rank has every tensor for it. A bucket's memory is fresh, one allocation under one handle: an engine may
answer before its copy has ended, so it must not be written again, and the allocator reuses it in stream order.
"""

import inspect
import io
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Semaphore
from typing import Any

import pybase64
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from fusionrl.observe.spans import note
from fusionrl.plan.push_plan import BUFFERS, EngineTarget, Feed
from fusionrl.weights.broadcast import start_thread
from fusionrl.weights.gather import buckets, of_all_ranks
from fusionrl.weights.remote_calls import SendReport, new_send_report, note_sent, stamp_of, wait_all

_Bucket = list[tuple[str, Tensor]]
STORAGE_DEVICE = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")


@dataclass
class CudaIpc:
    """One trainer rank's part of a push."""

    rank: int
    object_group: dist.ProcessGroup | None
    timeout_s: float
    device: torch.device
    targets: Sequence[EngineTarget]
    feeds: Sequence[Feed]
    version: int
    report: SendReport = field(default_factory=new_send_report, init=False)
    _queue: SimpleQueue[tuple[_Bucket, bool] | None] = field(default_factory=SimpleQueue, init=False)
    _slots: Semaphore = field(default_factory=lambda: Semaphore(BUFFERS), init=False)
    _failure: BaseException | None = field(default=None, init=False)

    def send(self, tensors: Iterator[tuple[str, Tensor]], buffer_size: int) -> SendReport:
        """Send `tensors`, whose iteration is collective, to every engine; see `WeightSender.send`. The next bucket is
        gathered while the engines copy this one: memory for two buckets, and for the tensor that is gathered."""
        thread = start_thread(self.device, self._run)
        ended: list[bool] = []
        bucket_iterator = buckets(_noting_end(tensors, ended), buffer_size)
        try:
            while self._slots.acquire() and (bucket := next(bucket_iterator, None)) is not None:
                flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
                torch.cuda.current_stream().synchronize()  # before another process reads it
                parts = zip(bucket, flat.split([tensor.nbytes for _, tensor in bucket]), strict=True)
                views = [(name, part.view(tensor.dtype).view(tensor.shape)) for (name, tensor), part in parts]
                self._queue.put((views, bool(ended)))
                del bucket, flat, parts, views  # only the thread holds it
        finally:
            self._queue.put(None)
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self.report

    def _run(self) -> None:
        number = 0
        while (item := self._queue.get()) is not None:
            bucket, is_last = item
            start, start_ns = time.time(), time.monotonic_ns()
            # A rank that has failed still takes part in collectives, in which the other ranks may wait for it.
            try:
                self._send_bucket(bucket, stamp_of(self.version if is_last else None))
            except BaseException as error:  # raised at the end, in the main thread
                self._failure = self._failure or RuntimeError(f"weight push, bucket {number + 1}: {error}")
            note("send", start_ns, time.monotonic_ns(), "send", bucket=number)
            number += 1
            # Every rank has the same bytes, and the engines of all get them once: the first rank counts them.
            num_bytes = sum(tensor.nbytes for _, tensor in bucket) if self.rank == 0 else 0
            note_sent(self.report, start, num_bytes=num_bytes, num_buckets=int(self.rank == 0))
            del item, bucket
            self._slots.release()

    def _send_bucket(self, bucket: _Bucket, stamp: Mapping[str, object]) -> None:
        handles = {target.index: target.handle for target in self.targets}
        calls = []
        for feed in self.feeds:
            payloads = self._payloads(feed, bucket)
            if self.rank == feed.leader and self._failure is None:
                load = handles[feed.engine].update_weights_from_tensor.remote
                calls.append((f"engine {feed.engine}", load(payloads, load_format=None, **stamp)))
        self.report["calls"] += len(calls)
        try:
            wait_all(calls, self.timeout_s)
        finally:
            # The memory must outlive every engine's copy of it, also of engines that another rank leads.
            if dist.is_initialized():
                dist.barrier(group=self.object_group)

    def _payloads(self, feed: Feed, bucket: _Bucket) -> list[str]:
        """One payload for each rank of the engine; gathered to the leader where several trainer ranks send."""
        payloads = {place: _serialize(bucket) for place, sender in enumerate(feed.senders) if sender == self.rank}
        if set(feed.senders) != {feed.leader}:
            gathered = of_all_ranks(payloads, dist.get_world_size(self.object_group), self.object_group)
            payloads = {place: payload for part in gathered for place, payload in part.items()}
        return [payloads[place] for place in sorted(payloads)]


def _noting_end(tensors: Iterator[tuple[str, Tensor]], ended: list[bool]) -> Iterator[tuple[str, Tensor]]:
    """`tensors`; when there are no more, `ended` has an item, which is before the last bucket is out."""
    yield from tensors
    ended.append(True)


class _Pickler(ForkingPickler):
    """Pickles tensors on a GPU as handles that name it by its UUID: the engine may number its GPUs in its own way.

    SGLang looks for a GPU of that UUID where the number of a device is usual.
    """

    def reducer_override(self, item: object) -> Any:  # of pickle, which has a union of five forms for it
        if isinstance(item, Tensor) and item.is_cuda:
            return with_uuid(reductions.reduce_tensor(item), _uuid)
        return NotImplemented


def with_uuid(reduced: tuple[object, tuple[object, ...]], uuid_of: Callable[[int], str]) -> tuple[object, tuple]:
    """Return what torch makes of a tensor for another process, with the UUID of its device in place of its number."""
    rebuild, args = reduced
    number = args[STORAGE_DEVICE]
    assert isinstance(number, int), f"not torch's form of a tensor on a GPU: {number!r} for its device"
    return rebuild, (*args[:STORAGE_DEVICE], uuid_of(number), *args[STORAGE_DEVICE + 1 :])


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def _serialize(bucket: _Bucket) -> str:
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(bucket)
    return pybase64.b64encode(out.getvalue()).decode()
