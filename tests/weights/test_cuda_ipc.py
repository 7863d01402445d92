"""Handles of GPU memory name the GPU by its UUID, as the engine numbers its own."""

import ast
import base64
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.multiprocessing import reductions

from fusionrl.plan.push_plan import EngineTarget, Feed
from fusionrl.weights import cuda_ipc
from fusionrl.weights.cuda_ipc import STORAGE_DEVICE, CudaIpc, with_uuid
from fusionrl.weights.gather import Exporter
from fusionrl.weights.remote_calls import stamp_of
from fusionrl.weights.send import WeightSender


def sglang_reads() -> SimpleNamespace:
    """The functions by which the installed SGLang reads a handle, and where it looks for the device."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    tree = ast.parse(Path(package.origin).parent.joinpath("srt/utils/patch_torch.py").read_text())
    wanted = ("_REDUCE_TENSOR_ARG_DEVICE_INDEX", "_device_from_maybe_uuid", "_modify_tuple")
    names = [n for n in tree.body if getattr(n, "name", "") in wanted or wanted[0] in ast.unparse(n).split(" = ")[0]]
    gpus = [SimpleNamespace(uuid=name) for name in ("b", "a")]
    fake = SimpleNamespace(device_count=lambda: 2, get_device_properties=lambda number: gpus[number])
    space: dict = {"torch": SimpleNamespace(cuda=fake), "Union": __import__("typing").Union, "Callable": object}
    exec(compile(ast.Module(names, []), "patch_torch.py", "exec"), space)
    return SimpleNamespace(place=space[wanted[0]], device=space[wanted[1]], modify=space[wanted[2]])


def test_another_numbering_finds_the_same_gpu():
    """The sender's GPU 0 is the engine's GPU 1."""
    args = tuple(f"argument {number}" for number in range(15))
    args = (*args[:STORAGE_DEVICE], 0, *args[STORAGE_DEVICE + 1 :])
    rebuild, sent = with_uuid((reductions.rebuild_cuda_tensor, args), {0: "a", 1: "b"}.__getitem__)
    assert rebuild is reductions.rebuild_cuda_tensor  # the one name that SGLang replaces, and lets in
    assert sent[:STORAGE_DEVICE] == args[:STORAGE_DEVICE] and sent[STORAGE_DEVICE + 1 :] == args[STORAGE_DEVICE + 1 :]
    engine = sglang_reads()
    assert engine.place == STORAGE_DEVICE
    assert engine.modify(sent, engine.place, engine.device)[STORAGE_DEVICE] == 1
    with pytest.raises(Exception, match="Invalid device_uuid=c"):
        engine.device("c")


def test_what_is_no_handle_is_refused():
    with pytest.raises(AssertionError, match="not torch's form"):
        with_uuid((reductions.rebuild_cuda_tensor, ("x",) * 15), str)


def test_the_pickle_has_the_uuid(monkeypatch):
    """Through the pickler itself; torch's own function makes the handle, which a CPU has none of."""
    made = (reductions.rebuild_cuda_tensor, (*range(15),))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: made)
    monkeypatch.setattr(cuda_ipc, "_uuid", lambda number: f"uuid of {number}")
    data = base64.b64decode(cuda_ipc._serialize([("w", torch.zeros(1))]))
    assert f"uuid of {STORAGE_DEVICE}".encode() in data
    assert b"rebuild_cuda_tensor" in data


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], object]]:
    """(payloads, version) of each call of an engine, in place of what needs a GPU: handles, streams."""
    calls: list[tuple[list[str], object]] = []
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(cuda_ipc, "_serialize", lambda bucket: "+".join(name for name, _ in bucket))
    monkeypatch.setattr(cuda_ipc, "wait_all", lambda calls, timeout_s: [call() for _, call in calls])
    return calls


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Three, of which two fit into a bucket."""
    return iter([(name, torch.zeros(4)) for name in "abc"])


def engine(sent: list[tuple[list[str], object]], error: Exception | None = None) -> SimpleNamespace:
    """The handle of an engine."""

    def update(payloads: list[str], *, load_format: None, **stamp: object) -> object:
        def call() -> None:
            sent.append((payloads, stamp))
            if error is not None:
                raise error

        return call

    return SimpleNamespace(update_weights_from_tensor=SimpleNamespace(remote=update))


def push(sent: list[tuple[list[str], object]], feed: Feed, error: Exception | None = None) -> dict:
    """Push from rank 0."""
    target = EngineTarget(0, engine(sent, error), "node", (0,))
    return CudaIpc(0, None, 5.0, torch.device("cpu"), [target], [feed], version=7).send(tensors(), 32)


def test_what_is_frozen_is_sent_once_to_each_process(sent: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exporter, "full", lambda exporter: tensors())
    layout, device = SimpleNamespace(world_size=1), torch.device("cpu")
    exporter: Any = Exporter([], None, Mock(), layout, 0, "float32", device)  # type: ignore[arg-type]
    place: Any = {"rank": 0, "device": "cuda", "backend": "nccl", "host": "", "buffer_size": 32, "timeout_s": 5.0}
    sender = WeightSender(**place, exporter=exporter, frozen=frozenset("ab"))
    for num_restarts in (0, 0, 1, 1):
        target = EngineTarget(0, engine(sent), "node", (0,), num_restarts)
        sender.send([target], [Feed(0, (0,), 0)], 7, "ipc")
    assert [payload for (payload,), _ in sent] == ["a+b", "c", "c", "a+b", "c", "c"]


def test_an_engine_gets_each_bucket_once_for_each_of_its_ranks(sent: list) -> None:
    report = push(sent, Feed(0, (0, 0), 0))
    assert [payloads for payloads, _ in sent] == [["a+b", "a+b"], ["c", "c"]]
    assert [stamp == stamp_of(7) for _, stamp in sent] == [False, True], "the last bucket has the version"
    assert (report["bytes"], report["buckets"], report["calls"]) == (48, 2, 2)


def test_a_failure_is_told_with_its_bucket_and_ends_the_calls(sent: list) -> None:
    with pytest.raises(RuntimeError, match="weight push, bucket 1: it has no room"):
        push(sent, Feed(0, (0,), 0), RuntimeError("it has no room"))
    assert len(sent) == 1, "no further call; the rest is gathered, as other ranks may wait for it"


def test_payloads_of_several_ranks_come_to_the_leader(sent: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(found: list[dict[int, str]], own: dict[int, str], group: None) -> None:
        found[:] = [own, {0: "of rank 1"}]

    monkeypatch.setattr(cuda_ipc.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(cuda_ipc.dist, "all_gather_object", gather)
    push(sent, Feed(0, (1, 0), 0))
    assert [payloads for payloads, _ in sent] == [["of rank 1", "a+b"], ["of rank 1", "c"]]
