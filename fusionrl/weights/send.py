"""The trainers' half of a weight push: bytes from trainer memory to the engines.

broadcast  each source and all engine ranks form a group (NCCL or gloo); each bucket is one flat broadcast.
ipc        on a CPU: each source writes its buckets into shared memory, or sends them by value to another node.
           CUDA: each engine rank maps the memory of the trainer rank on its own GPU, which has every tensor.

The rank's main thread gathers, in the trainer's process groups, and a second thread sends, in those with the engines:
the next bucket is gathered while this one is sent. The protocol, `fusionrl.weights.push`, runs in the driver.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fusionrl.base.group_stores import create_group_store, join_group_store
from fusionrl.engines.spec import LOADER
from fusionrl.engines.weight_payload import SharedBuffer, by_value, map_segment
from fusionrl.observe.spans import note, span
from fusionrl.plan.push_plan import BUFFERS, Bucket, EngineTarget, Feed, PushPlan, own_experts, plan_push
from fusionrl.weights.broadcast import Broadcast, start_thread
from fusionrl.weights.gather import Exporter, PartGatherer, Parts, of_all_ranks, quantize_in_place, views_of
from fusionrl.weights.remote_calls import SendReport, new_send_report, note_sent, stamp_of, wait_all

T = TypeVar("T")

_POLL_S = 0.002  # a bucket takes a hundred times as long; asking is work for the rank with the store
_CHECK_S = 0.05  # how often a wait looks whether another rank has failed


class PushStopped(RuntimeError):
    """Another rank's part of the push failed; says how."""


class SendOrder:
    """The order of one push's sends among its sources, in a store that all trainer ranks share: which numbered steps
    are done, and whether some rank has failed."""

    def __init__(self, store: dist.Store | None, push: str, timeout_s: float) -> None:
        """Without a `store` there is one source, which never waits; `push` is the same on all ranks and new."""
        self._store = None if store is None else dist.PrefixStore(push, store)
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s, self._stop = timeout_s, Event()
        self._done: list[str] = []

    def left_s(self) -> float:
        """Seconds that the push may still take."""
        return max(0.0, self._deadline - time.monotonic())

    def wait(self, steps: Iterable[int | str]) -> None:
        """Return when all `steps` are done. Another rank's failure is noticed within `_CHECK_S`.

        Raises PushStopped if a rank has failed; RuntimeError if this takes longer than the push may.
        """
        keys = [str(step) for step in steps]
        if self._store is None:
            return
        checked = 0.0
        while True:
            now = time.monotonic()
            if now - checked >= _CHECK_S:
                checked = now
                if self._store.check(["failed"]):
                    raise PushStopped(self._store.get("failed").decode())
            if self._stop.is_set():
                raise PushStopped("this rank's gathering failed")
            if not keys or self._store.check(keys):
                return
            if now > self._deadline:
                raise RuntimeError(f"weight push: no turn within {self._timeout_s:.0f} s (--update-weight-timeout-s)")
            time.sleep(_POLL_S)

    def done(self, step: int | str) -> None:
        """Release the ranks that wait for `step`."""
        if self._store is not None:
            self._store.set(str(step), "")
            self._done.append(str(step))

    def fail(self, error: BaseException) -> None:
        """Make every rank's `wait` raise."""
        self._stop.set()
        if self._store is None or isinstance(error, PushStopped):
            return
        try:
            if not self._store.check(["failed"]):
                self._store.set("failed", str(error))
        except RuntimeError:  # the rank with the store is gone, which the others see as well
            return

    def forget(self) -> None:
        """Take this rank's steps out of the store; only when no rank waits any more."""
        if self._store is not None:
            for key in self._done:
                self._store.delete_key(key)
        self._done.clear()


@dataclass
class _PreparedPush:
    """One push, prepared: its plan, and this rank's buffers with what is gathered already."""

    targets: tuple[EngineTarget, ...]
    transport: str
    plan: PushPlan
    leaves_out: bool  # what is frozen
    gatherer: PartGatherer
    buffers: list[SharedBuffer] | list[Tensor]
    send_order: SendOrder
    broadcast: Broadcast | None = None  # this rank's group, where it sends by one
    ready: SimpleQueue[tuple[Bucket, SharedBuffer | Tensor, Parts] | None] = field(default_factory=SimpleQueue)
    free: SimpleQueue[SharedBuffer | Tensor] = field(default_factory=SimpleQueue)


@dataclass(kw_only=True, eq=False)
class WeightSender:
    """One trainer rank's sender. All ranks call `prepare`, and then `send`, together."""

    rank: int
    device: str
    backend: str
    host: str  # this node's address
    exporter: Exporter
    buffer_size: int
    timeout_s: float
    node_id: str = ""  # the node's name as the targets have it
    object_group: dist.ProcessGroup | None = None  # gloo, over all trainer ranks; None: there is one rank
    frozen: frozenset[str] = frozenset()  # tensors that do not change: an engine that has them is not sent them again

    def __post_init__(self) -> None:
        # Engines reached → their group: those that only evaluate take part in some pushes alone.
        self._broadcasts: dict[tuple[int, ...], Broadcast] = {}
        self._push: _PreparedPush | None = None
        self._buffers: list[SharedBuffer] | list[Tensor] = []  # of this rank as a source; see `_make_buffers`
        self._store: dist.Store | None = None
        self._nodes: list[str] = []
        self._num_pushes = 0
        self._has_failed = False  # in the last push
        self._reached: set[tuple[int, int, str]] = set()  # processes of engines that have every tensor

    # ------------------------------------------------------------------------------------ preparation
    def prepare(self, targets: Sequence[EngineTarget], transport: str) -> None:
        """Make the plan and the groups, unless those of the last push still fit, and gather the first buckets."""
        self.exporter.refresh()
        if transport == "ipc" and self.device == "cuda":
            return
        self._meet()
        processes = [target.process for target in targets]
        leaves_out = bool(self.frozen) and self._reached.issuperset(processes)
        push, self._push = self._push, None
        wanted = transport, leaves_out, processes
        held = None if push is None else (push.transport, push.leaves_out, [one.process for one in push.targets])
        # After a failure some ranks have restarted, so all must.
        everyone = self._tell_all((held == wanted, leaves_out, self._num_pushes, self._has_failed))
        self._num_pushes = 1 + max(number for *_, number, _ in everyone)
        leaves_out = all(leaves_out for _, leaves_out, *_ in everyone)
        if any(has_failed for *_, has_failed in everyone):
            self.disconnect()  # it is unknown which engines still have which groups
            self._reached, leaves_out = set(), False
        self._has_failed = False
        if push is None or not all(fits for fits, *_ in everyone):
            push = None  # what it alone has goes before the new one comes
            push = self._make_push(tuple(targets), transport, leaves_out)
        push.send_order.forget()  # of the last push, which is over on all ranks
        store = self._store if len(push.plan.sources) > 1 else None
        push.send_order = SendOrder(store, f"push-{self._num_pushes}", self.timeout_s)
        push.targets, push.ready, push.free = tuple(targets), SimpleQueue(), SimpleQueue()
        self._push = push
        for buffer in push.buffers:
            push.free.put(buffer)
        try:
            try:
                self._connect(push)
            except BaseException as error:
                push.send_order.fail(error)
                raise
            finally:
                # Also after a failure: other ranks send their parts here.
                for bucket in push.plan.gathers(self.rank)[0]:
                    self._gather(push, bucket)
        except BaseException as error:  # raised again, when the others know
            self._give_up(error)
            raise

    def _tell_all(self, fact: T) -> list[T]:
        return of_all_ranks(fact, self.exporter.layout.world_size, self.object_group)

    def _meet(self) -> None:
        """Once: the store of the send order, and every rank's node."""
        if self._nodes:
            return
        is_alone = self.exporter.layout.world_size == 1
        store = create_group_store(self.host, self.timeout_s) if self.rank == 0 and not is_alone else None
        facts = self._tell_all((self.node_id, self.host, store.port if store is not None else 0))
        if not is_alone:
            self._store = store or join_group_store(facts[0][1], facts[0][2], self.timeout_s)
        self._nodes = [node for node, _, _ in facts]

    def _make_push(self, targets: tuple[EngineTarget, ...], transport: str, leaves_out: bool) -> _PreparedPush:
        exporter = self.exporter
        tensors = exporter.tensors(self.object_group)
        plan = plan_push(
            [tensor for tensor in tensors if not (leaves_out and tensor.name in self.frozen)],
            exporter.layout,
            len(targets),
            self.buffer_size,
            exporter.shape.num_experts,
        )
        buffers = self._make_buffers(plan, transport)
        gatherer = exporter.gatherer(plan, self._map_buffers(plan, buffers))
        return _PreparedPush(targets, transport, plan, leaves_out, gatherer, buffers, SendOrder(None, "", 0.0))

    def _make_buffers(self, plan: PushPlan, transport: str) -> list[SharedBuffer] | list[Tensor]:
        """A source's, in shared memory where engines or other ranks of this host read or write them.

        Those of the push before where they fit: engines keep a segment mapped until its slot has another one, and both
        would be in memory meanwhile.
        """
        num_bytes, _ = plan.buffer_bytes(self.rank)
        count = min(BUFFERS, len(plan.of_source(self.rank)))
        is_shared = transport == "ipc" or self._members_near(plan, self.rank)
        held, self._buffers = self._buffers, []
        fits = len(held) == count > 0 and _flat(held[0]).numel() == num_bytes
        if fits and isinstance(held[0], SharedBuffer) == is_shared:
            self._buffers = held
            return held
        del held  # these go before the new ones come
        if is_shared:
            self._buffers = [SharedBuffer(num_bytes, f"{self.rank}.{i}") for i in range(count)]
        else:
            # Written once here: the first touch of fresh memory costs more than what is copied into it.
            zeros = partial(torch.zeros, num_bytes, dtype=torch.uint8, device=self.exporter.device)
            self._buffers = [zeros() for _ in range(count)]
        return self._buffers

    def _members_near(self, plan: PushPlan, source: int) -> bool:
        """Return whether `source` gathers from others, and all of them on its host's memory."""
        members = {member for bucket in plan.of_source(source) for member in bucket.members}
        return self.device == "cpu" and len(members) > 1 and len({self._nodes[member] for member in members}) == 1

    def _map_buffers(self, plan: PushPlan, buffers: list[SharedBuffer] | list[Tensor]) -> dict[int, list[Tensor]]:
        """Source → its buffers, of the sources that this rank shares memory with; collective over all ranks."""
        near = [source for source in plan.sources if self._members_near(plan, source)]
        if not near:
            return {}
        offered: dict[int, list[tuple[str, int, int]]] = {}
        if self.rank in near:
            members = {member for bucket in plan.of_source(self.rank) for member in bucket.members}
            offered = {m: [buffer.where for buffer in buffers] for m in members - {self.rank}}
        all_offered = self._tell_all(offered)
        mapped = {
            source: [map_segment(where) for where in all_offered[source][self.rank]]
            for source in near
            if self.rank in all_offered[source]
        }
        return mapped | ({self.rank: [buffer.flat for buffer in buffers]} if offered else {})

    def _connect(self, push: _PreparedPush) -> None:
        """The sources' groups, one source after the other."""
        if push.transport != "broadcast" or self.rank not in push.plan.sources:
            return
        place = push.plan.sources.index(self.rank)
        push.send_order.wait(f"connected-{source}" for source in push.plan.sources[:place])
        key = tuple(target.index for target in push.targets)
        # When external engines come or go, all groups with the earlier ones become useless.
        external = {target.index for target in push.targets if target.host}
        for old in [old for old, broadcast in self._broadcasts.items() if broadcast.external_engines != external]:
            self._broadcasts.pop(old).close()
        if key not in self._broadcasts:
            self._broadcasts[key] = Broadcast(self.backend, self.host, self.timeout_s, self.exporter.device)
        push.broadcast = self._broadcasts[key]
        push.broadcast.connect(push.targets)
        push.send_order.done(f"connected-{self.rank}")

    def _gather(self, push: _PreparedPush, bucket: Bucket) -> None:
        with span("gather", bucket=bucket.number, source=bucket.source):
            if bucket.source != self.rank:
                push.gatherer.gather(bucket, None)
                return
            buffer = push.free.get()
            push.gatherer.gather(bucket, _flat(buffer))
            parts = views_of(bucket, _flat(buffer))
            if bucket.is_quantised:
                parts = quantize_in_place(parts, _flat(buffer), self.exporter.quantization)
                assert sum(view.nbytes for _, _, view in parts) == bucket.sent_bytes
            if self.device == "cuda":
                torch.cuda.current_stream().synchronize()  # another thread reads it
            push.ready.put((bucket, buffer, parts))

    # ------------------------------------------------------------------------------------ sending
    def send(self, targets: Sequence[EngineTarget], feeds: Sequence[Feed], version: int, transport: str) -> SendReport:
        """Send every tensor once to every engine, but what is frozen to none that has it; after `prepare` with the same
        targets. With its last bucket an engine gets the version, and empties its KV cache. Return what was sent."""
        processes = [target.process for target in targets]
        if transport == "ipc" and self.device == "cuda":
            from fusionrl.weights.cuda_ipc import CudaIpc

            who = (self.rank, self.object_group, self.timeout_s, self.exporter.device)
            knows_frozen = self._reached.issuperset(processes)
            leaves_out = bool(self.frozen) and all(self._tell_all(knows_frozen))
            tensors = self.exporter.whole(self.frozen if leaves_out else frozenset())
            report = CudaIpc(*who, targets, feeds, version).send(tensors, self.buffer_size)
            self._reached.update(processes)
            return report
        push = self._push
        assert push is not None, "prepare comes first"
        is_source = self.rank in push.plan.sources
        sending = _Sending(push, version, self.exporter, self.node_id) if is_source else None
        try:
            for bucket in push.plan.gathers(self.rank)[1]:
                self._gather(push, bucket)
            if sending is not None:
                sending.finish()
        except BaseException as error:  # raised again, when the others know
            if sending is not None:
                sending.abandon(error)
            self._give_up(error)
            raise
        self._reached.update(processes)
        return sending.report if sending is not None else new_send_report()

    def _give_up(self, error: BaseException) -> None:
        """After a failure: the others stop, and the next push begins anew."""
        if self._push is not None:
            self._push.send_order.fail(error)
        self._push, self._has_failed = None, True
        self.disconnect()

    def release(self) -> None:
        """Give the buffers back, and leave the groups with the engines; the next push makes them anew."""
        self.disconnect()
        self._push, self._buffers = None, []
        self._broadcasts.clear()

    def disconnect(self) -> None:
        """Leave the groups with the engines."""
        for broadcast in self._broadcasts.values():
            broadcast.close()


class _Sending:
    """The thread that sends what the main thread gathers. After a failure it keeps taking buckets without sending
    them: the main thread, and so the gathers of other ranks, must not wait for a buffer."""

    def __init__(self, push: _PreparedPush, version: int, exporter: Exporter, node_id: str) -> None:
        self.push, self._version, self._node_id = push, version, node_id
        self._num_experts = exporter.shape.num_experts
        self.report = new_send_report()
        self._failure: BaseException | None = None
        self._thread = start_thread(exporter.device, self._run)

    def _run(self) -> None:
        push = self.push
        while True:
            item = push.ready.get()
            if item is None:
                return
            bucket, buffer, parts = item
            if self._failure is None:
                try:
                    # Broadcasts are ordered. Engines that copy keep their own order, but the version comes last.
                    is_last = bucket is push.plan.buckets[-1]
                    before = range(bucket.number) if is_last else range(max(0, bucket.number - 1), bucket.number)
                    push.send_order.wait(before if push.transport == "broadcast" or is_last else ())
                    self._timed(bucket, buffer, parts)
                except BaseException as error:  # raised in the main thread, by `finish`
                    self._failure = error
                    push.send_order.fail(error)
            push.free.put(buffer)
            if bucket is push.plan.of_source(bucket.source)[-1]:
                return

    def _timed(self, bucket: Bucket, buffer: SharedBuffer | Tensor, parts: Parts) -> None:
        start, total, start_ns = time.time(), len(self.push.plan.buckets), time.monotonic_ns()
        try:
            calls = self._send(bucket, buffer, parts)
        except RuntimeError as error:
            raise RuntimeError(f"weight push, bucket {bucket.number + 1} of {total}: {error}") from error
        self.push.send_order.done(bucket.number)
        note("send", start_ns, time.monotonic_ns(), "send", bucket=bucket.number, bytes=bucket.sent_bytes)
        note_sent(self.report, start, num_bytes=bucket.sent_bytes, num_calls=calls)

    def _send(self, bucket: Bucket, buffer: SharedBuffer | Tensor, parts: Parts) -> int:
        """Let the engines load `parts` of `buffer`; return the number of calls when they have copied all."""
        push, left_s = self.push, self.push.send_order.left_s()
        stamp = stamp_of(self._version if bucket is push.plan.buckets[-1] else None)
        if push.transport == "broadcast":
            assert push.broadcast is not None
            named = [(name, view) for _, name, view in parts]
            return push.broadcast.send(named, _flat(buffer)[: bucket.sent_bytes], stamp, left_s)
        assert isinstance(buffer, SharedBuffer)
        calls = []
        for target in push.targets:
            # Engines of this node copy out of the shared memory; one on another node gets the bytes in the request.
            is_here = target.node_id == self._node_id
            payload_of, load_format = (buffer.payload, LOADER) if is_here else (by_value, None)
            payloads = [
                payload_of([(name, view) for t, name, view in parts if own_experts(t, target, rank, self._num_experts)])
                for rank in range(target.tp_size)
            ]
            call = target.handle.update_weights_from_tensor.remote(payloads, load_format=load_format, **stamp)
            calls.append((f"engine {target.index}", call))
        wait_all(calls, left_s)
        return len(calls)

    def finish(self) -> None:
        """Wait for the last bucket. Raises what went wrong in this thread."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def abandon(self, error: BaseException) -> None:
        """The main thread has failed: end this one."""
        self.push.send_order.fail(error)
        self.push.ready.put(None)
        if not isinstance(error, PushStopped):
            self._thread.join(5.0)


def _flat(buffer: SharedBuffer | Tensor) -> Tensor:
    return buffer.flat if isinstance(buffer, SharedBuffer) else buffer
