"""Pieces of a push that need no process: conversion in a bucket's place, the order of sends, waiting for calls."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusionrl.base.group_rendezvous import CalledOff, meet
from fusionrl.base.torch_stores import create_group_store, join_group_store
from fusionrl.models.families.rules import Rule
from fusionrl.plan.push import Bucket, EngineTarget, PushTensor
from fusionrl.weights import send
from fusionrl.weights.broadcast import Broadcast, _leave
from fusionrl.weights.gather import convert_in_place, views_of
from fusionrl.weights.process_group import init_external_group
from fusionrl.weights.remote_calls import wait_all
from fusionrl.weights.send_order import PushStopped, SendOrder
from tools.threaded import Threaded


def halves(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices become bytes and a scale; vectors stay as they are."""
    for name, tensor in tensors:
        if tensor.dim() == 1:
            yield name, tensor
            continue
        scale = tensor.float().abs().amax() / 100
        yield name, (tensor.float() / scale).round().to(torch.int8)
        yield name + "_scale", scale.reshape(1)


def test_a_bucket_is_converted_where_it_lies() -> None:
    """Each tensor aligned to its values, none overwritten before it is read, and it is known which tensor it was."""
    sizes = [(3,), (5, 7), (9,), (11, 3)]
    rules = [Rule(f"m{i}", {f"t{i}": size}) for i, size in enumerate(sizes)]
    tensors = tuple(PushTensor(f"t{i}", size, "bfloat16", rules[i], 0, 0) for i, size in enumerate(sizes))
    bucket = Bucket(0, (0,), (0,), tensors)
    flat = torch.zeros(bucket.nbytes + 40, dtype=torch.uint8)
    values = [torch.randn(size, generator=torch.Generator().manual_seed(i)).bfloat16() for i, size in enumerate(sizes)]
    for (_, _, view), value in zip(views_of(bucket, flat), values, strict=True):
        view.copy_(value)
    found = convert_in_place(views_of(bucket, flat), flat, halves)
    want = dict(halves((f"t{i}", value) for i, value in enumerate(values)))
    assert {name for _, name, _ in found} == {"t0", "t1", "t1_scale", "t2", "t3", "t3_scale"}
    end = 0
    for tensor, name, view in found:
        assert tensor.name == name.removesuffix("_scale")
        assert torch.equal(view, want[name]), name
        offset = view.data_ptr() - flat.data_ptr()
        assert offset == end, "one follows the other"
        assert offset % view.element_size() == 0
        end = offset + view.nbytes
    assert end < bucket.nbytes


@pytest.fixture
def store() -> dist.Store:
    return create_group_store("127.0.0.1", 30.0)


def test_a_step_waits_for_those_before_it(store: dist.Store) -> None:
    order: list[int] = []

    def go(number: int) -> None:
        send_order = SendOrder(dist.TCPStore("127.0.0.1", store.port, is_master=False), "p", 30.0)  # type: ignore[attr-defined]
        send_order.wait(range(number - 1, number) if number else ())
        order.append(number)
        send_order.done(number)

    threads = [threading.Thread(target=go, args=[number]) for number in (3, 2, 1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(20)
    assert order == [0, 1, 2, 3]


def test_a_failure_ends_every_wait_and_is_told(store: dist.Store) -> None:
    first, second = SendOrder(store, "p", 30.0), SendOrder(store, "p", 30.0)
    first.fail(RuntimeError("engine 3 is dead"))
    with pytest.raises(PushStopped, match="engine 3 is dead"):
        second.wait([0])
    SendOrder(store, "the next one", 30.0).wait([])
    with pytest.raises(RuntimeError, match=r"no turn within 0 s \(--update-weight-timeout-s\)"):
        SendOrder(store, "another", 0.05).wait([0])


class Engine:
    def good(self, value: int) -> int:
        return value + 1

    def bad(self) -> None:
        raise ValueError("no such weight")


def test_the_first_failure_ends_the_wait_for_the_others() -> None:
    engine = Threaded(Engine())
    assert wait_all([("a", engine.good.remote(1)), ("b", engine.good.remote(2))], 10.0) == [2, 3]
    never: Future[None] = Future()
    with pytest.raises(RuntimeError, match="engine 1: no such weight"):
        wait_all([("engine 0", never), ("engine 1", engine.bad.remote())], 10.0)
    with pytest.raises(RuntimeError, match=r"engine 0: no end after 0 s \(--update-weight-timeout-s\)"):
        wait_all([("engine 0", never)], 0.05)


class Joining:
    """An engine that joins a group as SGLang does, with a limit of half an hour."""

    def init_weights_update_group(self, **values: Any) -> None:
        sizes = (values["world_size"], values["rank_offset"], values["group_name"])
        store = join_group_store(values["master_address"], values["master_port"], 1800.0)
        init_external_group(values["backend"], store, *sizes, 1800.0)


class Unwilling:
    def init_weights_update_group(self, **values: Any) -> None:
        raise RuntimeError("no group today")


def test_an_engine_that_refuses_to_join_sets_the_others_free() -> None:
    """Before, they sat in the constructor of their group, and answered nothing, up to torch's own limit."""
    joining, start = Threaded(Joining()), time.monotonic()
    calls: list[Future[Any]] = []

    class Noting:
        """Keeps the call, to see how it ends."""

        def remote(self, **values: Any) -> Future[Any]:
            calls.append(joining.init_weights_update_group.remote(**values))
            return calls[-1]

    handles = [SimpleNamespace(init_weights_update_group=Noting()), Threaded(Unwilling())]
    targets = [EngineTarget(index, handle, "", (index,)) for index, handle in enumerate(handles)]
    with pytest.raises(RuntimeError, match="engine 1: joining the group: no group today"):
        Broadcast("gloo", "127.0.0.1", 60.0, torch.device("cpu")).connect(targets)
    with pytest.raises(CalledOff, match="no group today"):
        calls[0].result(20)
    assert time.monotonic() - start < 20


class Gloo:
    """An engine with a gloo group; this process has torch's registry of groups once, so it goes without."""

    def __init__(self) -> None:
        self.group: Any = None

    def init_weights_update_group(self, **values: Any) -> None:
        name, rank = values["group_name"], values["rank_offset"]
        store = join_group_store(values["master_address"], values["master_port"], 30.0)
        meet(store, rank, values["world_size"], 30.0)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self.group = c10d.ProcessGroupGloo(store, rank, values["world_size"], timedelta(minutes=30))

    def update_weights_from_distributed(self, **values: Any) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([torch.zeros(4, dtype=torch.uint8)], options).wait()

    def destroy_weights_update_group(self, name: str) -> None:
        """Nothing, as an engine whose scheduler stands in a broadcast."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python collects no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


def test_an_engine_that_waits_for_bytes_is_let_go_when_another_is_dead(no_collection: None) -> None:
    """Now and then it waited until a collection of garbage freed the error of the push, and the next one failed."""
    dying, waiting = Gloo(), Gloo()
    begun: list[Future[Any]] = []

    class Dying(Threaded):
        """The last of its calls: the source then finds its connection closed before it sends anything."""

        @property
        def update_weights_from_distributed(self) -> Any:
            def die(**values: Any) -> Future[Any]:
                dying.group = None
                time.sleep(0.5)
                failed: Future[Any] = Future()
                failed.set_exception(RuntimeError("connection refused"))
                return failed

            return SimpleNamespace(remote=die)

    class Noting(Threaded):
        @property
        def update_weights_from_distributed(self) -> Any:
            def note(**values: Any) -> Future[Any]:
                begun.append(Threaded(waiting).update_weights_from_distributed.remote(**values))
                return begun[0]

            return SimpleNamespace(remote=note)

    targets = [EngineTarget(0, Dying(dying), "", (0,)), EngineTarget(1, Noting(waiting), "", (0,))]
    broadcast = Broadcast("gloo", "127.0.0.1", 60.0, torch.device("cpu"))
    broadcast.connect(targets)
    flat = torch.arange(4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="engine 0: connection refused") as raised:
        broadcast.send([("weight", flat)], flat, {}, 30.0)
    assert not begun[0].done()
    broadcast.close()
    with pytest.raises(RuntimeError, match="onnection"):
        begun[0].result(20)
    assert raised.value is not None, "the error, and what its traceback holds, lives until here"


def test_a_group_that_came_into_being_though_an_engine_failed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    monkeypatch.setattr(dist, "destroy_process_group", left.append)

    class Failing(Gloo):
        def init_weights_update_group(self, **values: Any) -> None:
            super().init_weights_update_group(**values)
            raise RuntimeError("died after it joined")

    with pytest.raises(RuntimeError, match="engine 0: joining the group: died after it joined"):
        Broadcast("gloo", "127.0.0.1", 60.0, torch.device("cpu")).connect(
            [EngineTarget(0, Threaded(Failing()), "", (0,))]
        )
    deadline = time.monotonic() + 20
    while not left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(left) == 1 and isinstance(left[0], dist.ProcessGroup)
    monkeypatch.undo()
    dist.destroy_process_group(left[0])


@pytest.mark.parametrize(("backend", "way"), [("nccl", "aborted"), ("gloo", "destroyed")])
def test_how_a_group_is_left(backend: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for a broadcast that an engine never joined, and its watchdog end the trainer."""
    found: list[tuple[str, object]] = []
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: found.append(("destroyed", group)))
    monkeypatch.setattr(c10d, "_abort_process_group", lambda group: found.append(("aborted", group)))
    group: Any = object()
    _leave(group)
    assert found == [(way, group)]


def test_a_group_with_engines_that_came_or_went_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each guest that joins would leave one more group open, on all sides."""

    class Noted(Broadcast):
        def connect(self, targets: Any) -> None:
            self._targets = tuple(targets)

        def close(self) -> None:
            closed.append([target.index for target in self._targets])

    monkeypatch.setattr(send, "Broadcast", Noted)
    closed: list[list[int]] = []
    sender: Any = SimpleNamespace(
        rank=0, backend="gloo", host="h", timeout_s=1.0, exporter=SimpleNamespace(device="cpu")
    )
    sender._broadcasts = {}
    send_order = SimpleNamespace(wait=lambda names: None, done=lambda name: None)
    plan = SimpleNamespace(sources=[0], engines_of=lambda rank: range(99))

    def push(*indices: int) -> None:
        targets = [EngineTarget(index, None, "n", (0,), host="" if index < 3 else "other") for index in indices]
        order: Any = SimpleNamespace(transport="broadcast", plan=plan, send_order=send_order, targets=targets)
        send.WeightSender._connect(sender, order)

    push(0, 1, 2)
    push(0, 1)  # without the one that evaluates: both stay
    push(0, 1, 2)
    assert closed == [] and len(sender._broadcasts) == 2
    for guest in range(3, 9):
        push(0, 1, guest)
        assert [*sender._broadcasts] == [(0, 1, guest)]
    push(0, 1)
    assert closed == [[0, 1, 2], [0, 1], *([0, 1, guest] for guest in range(3, 9))]


def test_engines_of_others_are_asked_before_anybody_joins() -> None:
    class Engine:
        def fault(self) -> str:
            return "connection refused"

        def init_weights_update_group(self, **values: Any) -> None:
            raise AssertionError("own ranks wait for it until their time is up")

    targets = [
        EngineTarget(0, Threaded(Engine()), "n", (0,)),
        EngineTarget(5, Threaded(Engine()), "n", (0,), host="127.0.0.1"),
    ]
    with pytest.raises(RuntimeError, match="engine 5: connection refused"):
        Broadcast("gloo", "127.0.0.1", 60.0, torch.device("cpu")).connect(targets)


def test_a_guest_that_dies_while_it_joins_sets_the_runs_own_engines_free() -> None:
    """They sat in gloo's constructor, since the guest was said to be there, for SGLang's limit of half an hour."""
    calls: list[Future[Any]] = []

    class Own(Joining):
        def init_weights_update_group(self, **values: Any) -> None:
            calls.append(Future())
            try:
                super().init_weights_update_group(**values)
            except RuntimeError as error:
                calls[0].set_exception(error)
                raise

    class Guest:
        def fault(self) -> None:
            return None

        def init_weights_update_group(self, **values: Any) -> None:
            time.sleep(1.0)  # the others are in the constructor meanwhile
            raise RuntimeError("the connection was reset")

    targets = [
        EngineTarget(0, Threaded(Own()), "n", (0,)),
        EngineTarget(5, Threaded(Guest()), "guest 127.0.0.1", (-1,), host="127.0.0.1"),
    ]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="engine 5: joining the group: the connection was reset"):
        Broadcast("gloo", "127.0.0.1", 60.0, torch.device("cpu")).connect(targets)
    assert isinstance(calls[0].exception(20), RuntimeError)
    assert time.monotonic() - start < 20
