"""Pieces of a push that need no process: conversion in a bucket's place, the order of sends, waiting for calls."""

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

from fusionrl.base.group_stores import CalledOff, create_group_store, join_group_store, meet
from fusionrl.base.wording import LOG_END
from fusionrl.engines.process import ChildExited
from fusionrl.models.convert import quantized
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.rules import Rule
from fusionrl.plan.push_plan import Bucket, EngineTarget, PushTensor
from fusionrl.weights import send
from fusionrl.weights.broadcast import Broadcast, _leave, init_external_group
from fusionrl.weights.gather import quantize_in_place, views_of
from fusionrl.weights.push import Push
from fusionrl.weights.remote_calls import new_send_report, wait_all
from fusionrl.weights.send import PushStopped, SendOrder
from tools.threaded import Threaded


def test_a_bucket_is_quantised_where_it_lies() -> None:
    """Each tensor aligned to its values, none overwritten before it is read, and it is known which tensor it was."""
    values = {f"t{i}": torch.randn(size).bfloat16() for i, size in enumerate([(3,), (5, 8), (9,), (11, 8)])}
    sizes = {name: tuple(value.shape) for name, value in values.items()}
    rules = {name: Rule(name, {name: size}) for name, size in sizes.items()}
    tensors = tuple(PushTensor(name, size, "bfloat16", rules[name], 0, 0) for name, size in sizes.items())
    bucket = Bucket(0, (0,), tensors)
    flat = torch.zeros(bucket.nbytes + 40, dtype=torch.uint8)
    for _, name, view in views_of(bucket, flat):
        view.copy_(values[name])
    spec = BlockFp8((4, 4), False, frozenset({"t1", "t3"}))
    found = quantize_in_place(views_of(bucket, flat), flat, spec)
    want, end = dict(quantized(values.items(), spec)), 0
    assert {name for _, name, _ in found} == {"t0", "t1", "t1_scale_inv", "t2", "t3", "t3_scale_inv"}
    for tensor, name, view in found:
        assert tensor.name == name.removesuffix("_scale_inv")
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


class DyingEngine:
    """Every call fails from `dies_in` on, as an engine's calls do after its server was killed."""

    def __init__(self, dies_in: str) -> None:
        self.dies_in, self.is_dead = dies_in, False

    def __getattr__(self, name: str) -> Any:
        self.is_dead |= name == self.dies_in
        return self._fail if self.is_dead else lambda *_, **__: None

    def _fail(self, *_: object, **__: object) -> None:
        raise ChildExited(f"server: the process ended. Its log is engine-0.log; {LOG_END}a line", "")


@pytest.mark.parametrize("dies_in", ["pause", "begin_weight_update", "end_weight_update", "resume"])
def test_the_end_of_a_dead_engines_log_comes_once(dies_in: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = SimpleNamespace(prepare_push=lambda *_: None, push_weights=lambda *_: new_send_report())
    engine = DyingEngine(dies_in)
    push = Push([Threaded(trainer)], [EngineTarget(0, Threaded(engine), "node", (0,))], 1, 10.0)
    with caplog.at_level("WARNING"), pytest.raises(RuntimeError, match="engine 0: ") as error:
        push.from_memory([], "broadcast", "retract")
    assert engine.is_dead and "engine 0: resume: server: the process ended. Its log is engine-0.log" in caplog.text
    assert (caplog.text + str(error.value)).count(LOG_END) == 1 and str(error.value).endswith(f"; {LOG_END}a line")


def test_a_load_from_files_that_fails_shows_the_end_of_a_log_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = SimpleNamespace(write_weights=lambda *_: {"folder": "v1", "bytes": 1, "files": 1, "density": 1.0})
    engines = [DyingEngine("update_weights_from_disk"), DyingEngine("")]
    targets = [EngineTarget(index, Threaded(engine), "node", (index,)) for index, engine in enumerate(engines)]
    push = Push([Threaded(trainer)], targets, 1, 10.0)
    with caplog.at_level("WARNING"), pytest.raises(RuntimeError, match="0: load: .*; engine 0: resume: ") as error:
        push.by_disk(None, "retract", keep_files=True)
    assert engines[0].is_dead and not engines[1].is_dead
    assert (caplog.text + str(error.value)).count(LOG_END) == 1 and str(error.value).endswith(f"; {LOG_END}a line")


def broadcast() -> Broadcast:
    return Broadcast("gloo", "127.0.0.1", 60.0, torch.device("cpu"))


def test_engines_on_nodes_that_have_joined_since_reach_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def create(host: str, timeout_s: float, guests: list[str], peers: list[str]) -> None:
        found.append((guests, peers))
        raise OSError("enough")

    monkeypatch.setattr("fusionrl.weights.broadcast.create_group_store", create)
    targets = [EngineTarget(i, None, "n", (i,), addresses=("10.0.0.2", f"10.0.0.{i}")) for i in (1, 3)]
    with pytest.raises(OSError, match="enough"):
        broadcast().connect(targets)
    assert found == [([], ["10.0.0.1", "10.0.0.2", "10.0.0.3"])]


class Joining:
    """An engine that joins a group as SGLang does, with a limit of half an hour; and how its call ends."""

    def __init__(self) -> None:
        self.end: Future[None] = Future()

    def init_weights_update_group(self, **values: Any) -> None:
        sizes = (values["world_size"], values["rank_offset"], values["group_name"])
        store = join_group_store(values["master_address"], values["master_port"], 1800.0)
        try:
            init_external_group(values["backend"], store, *sizes, 1800.0)
        except RuntimeError as error:
            self.end.set_exception(error)
            raise


class Unwilling:
    """An engine that answers with a fault, or refuses to join after `seconds`."""

    def __init__(self, fault: str | None = None, seconds: float = 0.0) -> None:
        self._fault, self._seconds = fault, seconds

    def fault(self) -> str | None:
        return self._fault

    def init_weights_update_group(self, **values: Any) -> None:
        assert self._fault is None, "own ranks wait for it until their time is up"
        time.sleep(self._seconds)
        raise RuntimeError("no group today")


@pytest.mark.parametrize(
    ("index", "host", "seconds", "error"),
    [
        (1, "", 0.0, CalledOff),
        # They sat in gloo's constructor, since the guest was said to be there, for SGLang's limit of half an hour.
        (5, "127.0.0.1", 1.0, RuntimeError),
    ],
    ids=["own", "guest"],
)
def test_an_engine_that_refuses_to_join_sets_the_others_free(
    index: int, host: str, seconds: float, error: type[RuntimeError]
) -> None:
    """Before, they sat in the constructor of their group, and answered nothing, up to torch's own limit."""
    joining, unwilling, start = Joining(), Threaded(Unwilling(None, seconds)), time.monotonic()
    targets = [EngineTarget(0, Threaded(joining), "n", (0,)), EngineTarget(index, unwilling, "", (1,), host=host)]
    with pytest.raises(RuntimeError, match=f"engine {index}: joining the group: no group today"):
        broadcast().connect(targets)
    with pytest.raises(error):
        joining.end.result(20)
    assert time.monotonic() - start < 20


def test_engines_of_others_are_asked_before_anybody_joins() -> None:
    unwilling = Threaded(Unwilling("connection refused"))
    targets = [EngineTarget(0, unwilling, "n", (0,)), EngineTarget(5, unwilling, "n", (0,), host="127.0.0.1")]
    with pytest.raises(RuntimeError, match="engine 5: connection refused"):
        broadcast().connect(targets)


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
    source = broadcast()
    source.connect(targets)
    flat = torch.arange(4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="engine 0: connection refused") as raised:
        source.send([("weight", flat)], flat, {}, 30.0)
    assert not begun[0].done()
    source.close()
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
        broadcast().connect([EngineTarget(0, Threaded(Failing()), "", (0,))])
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
    plan = SimpleNamespace(sources=[0])

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
