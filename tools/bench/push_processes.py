"""Processes that take part in a weight push, and in nothing else: trainer ranks that only hold weights, and receivers.

The ranks run the product's sender on random tensors of a model's real names and shapes, divided as Megatron divides
them, in real process groups. A receiver answers the requests of an engine, and drops what it receives (or hashes it).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pybase64
import torch
import torch.distributed as dist
from torch import Tensor

from fusionrl.base.group_stores import create_group_store
from fusionrl.engines.external_engine import AttachedEngine
from fusionrl.engines.spec import LOADER
from fusionrl.engines.weight_payload import take
from fusionrl.models import convert
from fusionrl.models.convert import quantized
from fusionrl.models.families import Rule, model_rules
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.push_plan import EngineTarget, PushPlan, PushTensor, push_tensors, stage_of_rule
from fusionrl.weights.broadcast import init_external_group
from fusionrl.weights.gather import DTYPES, PartGatherer
from fusionrl.weights.send import WeightSender
from tools.threaded import Threaded

HOST = "127.0.0.1"
TIMEOUT_S = 600.0


# ------------------------------------------------------------------------------------------------ trainer ranks
def whole_tensor(rule: Rule, dtype: torch.dtype, seed: int) -> Tensor:
    """The Megatron tensor of a rule, the same wherever it is made."""
    generator = torch.Generator().manual_seed(int(hashlib.sha256(rule.megatron.encode()).hexdigest()[:12], 16) + seed)
    return torch.randn(rule.sizes, generator=generator, dtype=torch.float32).to(dtype)


class Parts:
    """A stand-in for `Exporter`, with tensors that belong to no model."""

    def __init__(self, options: RankOptions, rank: int) -> None:
        shape, layout = options.shape, options.layout
        self.shape, self.layout, self.rank, self.dtype = shape, layout, rank, options.dtype
        self.quantization = options.quantization
        self.device = torch.device(options.device)
        stages = stage_layers(layout, shape.num_layers, {})
        assert stages is not None
        self._stage_of = stage_of_rule(stages)
        per_stage = layout.world_size // layout.pp
        self._stage, inner = divmod(rank, per_stage)
        self._tp, self._etp, self._ep = inner % layout.tp, inner % layout.etp, inner // layout.etp % layout.ep
        first = rank - rank % per_stage
        self._groups = [_group_of(rank, layout.world_size, layout.tp)]
        if shape.num_experts:
            self._groups.append(_group_of(rank, layout.world_size, layout.etp))
        if any(rule.stack for rule in model_rules(shape).values()):
            assert layout.etp == 1, "the expert-parallel ranks are neighbours"
            self._groups.append(_group_of(rank, layout.world_size, layout.ep))
        assert first % layout.tp == first % layout.etp == 0
        self.own: dict[str, tuple[Rule, Tensor]] = {}
        self.fill(seed=0)

    def fill(self, seed: int) -> None:
        """Give every tensor other values."""
        for rule in model_rules(self.shape).values():
            if self._stage_of(rule) != self._stage:
                continue
            place, size = self._tp, self.layout.tp
            if rule.expert is not None:
                if rule.expert * self.layout.ep // self.shape.num_experts != self._ep:
                    continue
                place, size = self._etp, self.layout.etp
            full = whole_tensor(rule, DTYPES[self.dtype], seed).to(self.device)
            self.own[rule.megatron] = (rule, convert.split(rule, full, place, size).contiguous())

    def refresh(self) -> None:
        """Nothing to reload."""

    def tensors(self, group: Any) -> list[PushTensor]:
        """As `Exporter.tensors`."""
        return push_tensors(self.shape, self._stage_of, self.dtype, self.quantization)

    def gatherer(self, plan: PushPlan, mapped: Mapping[int, Sequence[Tensor]]) -> PartGatherer:
        """As `Exporter.gatherer`."""
        return PartGatherer(self.rank, plan, self.own, self._groups, self.device, mapped)

    def whole(self) -> Any:
        """(name, tensor) of all, of a single rank."""
        assert self.layout.world_size == 1
        parts = ((rule.hf, convert.take_apart(rule, part)) for rule, part in self.own.values())
        full = (pair for names, tensors in parts for pair in zip(names, tensors, strict=True))
        return quantized(full, self.quantization)


def _group_of(rank: int, world_size: int, size: int) -> dist.ProcessGroup:
    """The group of `size` neighbours that `rank` is in; all ranks make all of them."""
    own_group = None
    for first in range(0, world_size, size):
        group = dist.new_group(range(first, first + size))
        if first <= rank < first + size:
            own_group = group
    assert own_group is not None
    return own_group


@dataclass(frozen=True)
class RankOptions:
    """The way in which the ranks send."""

    shape: ModelShape
    layout: TrainerLayout
    dtype: str = "bfloat16"
    device: str = "cpu"
    buffer_size: int = 256 * 1024**2
    timeout_s: float = TIMEOUT_S
    quantization: BlockFp8 | None = None
    nodes: tuple[str, ...] = ()  # rank → the name of its node; empty: all are on one without a name
    frozen: frozenset[str] = frozenset()  # names of tensors that do not change


class Rank:
    """One trainer rank, in its process."""

    def __init__(self, options: RankOptions, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore(HOST, port, is_master=False),
            rank=rank,
            world_size=options.layout.world_size,
            timeout=timedelta(seconds=options.timeout_s),
        )
        self.options, self.rank = options, rank
        self.parts = Parts(options, rank)
        self._object_group = dist.new_group(backend="gloo")
        self.configure(options.buffer_size)

    def configure(self, buffer_size: int) -> None:
        """Use buckets of this size, from the next push on."""
        if hasattr(self, "sender"):
            self.sender.disconnect()
        self.sender = WeightSender(
            rank=self.rank,
            device=self.options.device,
            backend="gloo",
            host=HOST,
            node_id=self.options.nodes[self.rank] if self.options.nodes else "",
            exporter=self.parts,  # type: ignore[arg-type]
            buffer_size=buffer_size,
            timeout_s=self.options.timeout_s,
            object_group=self._object_group,
            frozen=self.options.frozen,
        )

    def fill(self, seed: int) -> None:
        """See `Parts.fill`."""
        self.parts.fill(seed)

    def prepare_push(self, targets: Sequence[EngineTarget], transport: str) -> float:
        """Prepare like a trainer; return the seconds that it took."""
        start = time.perf_counter()
        self.sender.prepare(targets, transport)
        return time.perf_counter() - start

    def push_weights(self, targets: Any, feeds: Any, version: int, transport: str) -> dict[str, Any]:
        """Push like a trainer."""
        self.report = self.sender.send(targets, feeds, version, transport)
        return self.report

    def last_report(self) -> dict[str, Any]:
        """Return the result of the last push."""
        return self.report

    def plan_facts(self) -> dict[str, Any]:
        """Of the plan that was used last."""
        plan = self.sender._push.plan  # type: ignore[union-attr]
        return {
            "sources": list(plan.sources),
            "buckets": len(plan.buckets),
            "calls": plan.num_calls,
            "peak_bytes": max(plan.peak_bytes(rank) for rank in range(self.options.layout.world_size)),
        }

    def raw_broadcast(self, num_bytes: int, bucket: int, port: int, world_size: int) -> float:
        """Seconds of bare broadcasts of `num_bytes` from rank 0's one buffer."""
        store = dist.TCPStore(HOST, port, is_master=False)
        group = init_external_group("gloo", store, world_size, 0, "raw", TIMEOUT_S)
        buffer = torch.ones(bucket, dtype=torch.uint8)
        dist.broadcast(buffer[:1], src=0, group=group)
        start = time.perf_counter()
        for size in _sizes(num_bytes, bucket):
            dist.broadcast(buffer[:size], src=0, group=group)
        dist.barrier(group=group)
        seconds = time.perf_counter() - start
        dist.destroy_process_group(group)
        return seconds

    def raw_memcpy(self, num_bytes: int, bucket: int) -> float:
        """Seconds to copy `num_bytes` from one buffer into another, both touched before."""
        source, target = torch.ones(bucket, dtype=torch.uint8), torch.zeros(bucket, dtype=torch.uint8)
        start = time.perf_counter()
        for size in _sizes(num_bytes, bucket):
            target[:size].copy_(source[:size])
        return time.perf_counter() - start


def _sizes(num_bytes: int, bucket: int) -> list[int]:
    return [min(bucket, num_bytes - done) for done in range(0, num_bytes, bucket)]


# ------------------------------------------------------------------------------------------------ receivers
class Receiver:
    """One rank of an engine for a push: it copies the data that arrives, and drops it.

    With `hashes` set, it keeps each tensor's hash."""

    def __init__(self, hashes: bool, device: str) -> None:
        self.hashes, self.device = hashes, device
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.buffer = torch.zeros(0, dtype=torch.uint8, device=device)
        self.in_session = self.paused = False
        self.lock = threading.Lock()  # an engine takes one update at a time
        self.reset()

    def reset(self) -> None:
        self.num_bytes = self.num_calls = 0
        self.found: dict[str, str] = {}
        self.last_s = 0.0
        self.version: str | None = None

    def init_weights_update_group(self, body: dict[str, Any]) -> None:
        store = dist.TCPStore(HOST, body["master_port"], is_master=False)
        sizes = body["world_size"], body["rank_offset"], body["group_name"]
        group = init_external_group(body["backend"], store, *sizes, TIMEOUT_S)
        self.groups[body["group_name"]] = group

    def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        dist.destroy_process_group(self.groups.pop(body["group_name"]))

    def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(body["shapes"], dtypes, strict=True)]
        with self._update(body, sum(sizes)) as flat:
            dist.broadcast(flat, src=0, group=self.groups[body["group_name"]])
            self._note(zip(body["names"], flat.split(sizes), strict=True))

    def update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        named = pickle.loads(pybase64.b64decode(body["serialized_named_tensors"][0]))
        if body["load_format"] == LOADER:
            named = take(named)
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in named]
        with self._update(body, sum(sizes)) as flat:
            parts = flat.split(sizes)
            for (_, tensor), part in zip(named, parts, strict=True):
                part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            if self.device == "cuda":
                torch.cuda.synchronize()
            self._note((name, part) for (name, _), part in zip(named, parts, strict=True))

    @contextmanager
    def _update(self, body: dict[str, Any], num_bytes: int) -> Iterator[Tensor]:
        """Room for the bytes of one update; then what is known of it."""
        if not (self.in_session and self.paused):
            raise RuntimeError("an update outside of a session")
        with self.lock:
            yield self._room(num_bytes)
            self.num_bytes += num_bytes
            self.num_calls += 1
            self.last_s = time.time()
            self.version = body["weight_version"] or self.version

    def _room(self, num_bytes: int) -> Tensor:
        if self.buffer.numel() < num_bytes:
            self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return self.buffer[:num_bytes]

    def _note(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, part in named if self.hashes else ():
            assert name not in self.found, f"{name} came twice"
            self.found[name] = hashlib.sha256(part.cpu().numpy()).hexdigest()

    def begin_weight_update(self, body: dict[str, Any]) -> None:
        if self.in_session:
            raise RuntimeError("a weight-update session is already open")
        self.reset()  # of a push that failed
        self.in_session = True

    def end_weight_update(self, body: dict[str, Any]) -> None:
        self.in_session = False

    def pause_generation(self, body: dict[str, Any]) -> None:
        self.paused = True

    def continue_generation(self, body: dict[str, Any]) -> None:
        self.paused = False

    def raw_broadcast(self, body: dict[str, Any]) -> None:
        store = dist.TCPStore(HOST, body["port"], is_master=False)
        sizes = body["world_size"], body["rank"], "raw"
        group = init_external_group("gloo", store, *sizes, TIMEOUT_S)
        buffer = self._room(body["bucket"])
        dist.broadcast(buffer[:1], src=0, group=group)
        for size in _sizes(body["num_bytes"], body["bucket"]):
            dist.broadcast(buffer[:size], src=0, group=group)
        dist.barrier(group=group)
        dist.destroy_process_group(group)

    def received(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the data that arrived since the last call."""
        facts = {
            "bytes": self.num_bytes,
            "hashes": self.found,
            "calls": self.num_calls,
            "last_s": self.last_s,
            "version": self.version,
            "groups": sorted(self.groups),
            "is_released": not (self.in_session or self.paused),
        }
        self.reset()
        return facts


def _serve_receiver(pipe: Any, hashes: bool, device: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    receiver = Receiver(hashes, device)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            try:
                answer, status = getattr(receiver, self.path.lstrip("/"))(body), 200
            except Exception as error:  # as an engine: what went wrong is the answer
                answer, status = {"message": f"{error!r}"}, 400
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Silence."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server((HOST, 0), Handler)
    threading.Thread(target=_end_with, args=[pipe], daemon=True).start()
    pipe.send(server.server_address[1])
    server.serve_forever()


def _end_with(pipe: Any) -> None:
    """End this process with its parent."""
    try:
        pipe.recv()
    except EOFError:
        pass
    os._exit(0)


# ------------------------------------------------------------------------------------------------ the parent's side
class Process:
    """A child process; `kill` is SIGKILL."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        # Forks of a process that has imported all this and done nothing yet.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def answer(self, timeout_s: float = TIMEOUT_S) -> Any:
        """The next thing that the child sends.

        Raises:
            RuntimeError: it is dead, or silent for too long, or it raised.
        """
        try:
            if not self.pipe.poll(timeout_s):
                raise RuntimeError(f"process {self.pid}: no answer in {timeout_s:.0f} s")
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"process {self.pid} is dead") from error
        if isinstance(answer, _Raised):
            raise RuntimeError(answer.text)
        return answer

    def close(self) -> None:
        """End it."""
        if self.process.is_alive():  # another process may have the number of a dead one
            self.process.kill()
        self.process.join()
        # The pipe closes with its last user: a thread that still polls it would poll the next file with its number.


@dataclass
class _Raised:
    text: str


def _serve_rank(pipe: Any, options: RankOptions, rank: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        actor = Rank(options, rank, port)
        pipe.send(None)
    except Exception as error:  # the parent raises it
        pipe.send(_Raised(f"{error!r}\n{traceback.format_exc()}"))
        return
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(actor, method)(*args))
        except Exception as error:  # the parent raises it
            pipe.send(_Raised(f"{type(error).__name__}: {error}"))


class _RankCalls:
    """Make one call after the other, as an actor does, even after a call that its caller abandoned."""

    def __init__(self, process: Process) -> None:
        self._process, self._lock = process, threading.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any) -> Any:
            with self._lock:
                try:
                    self._process.pipe.send((method, args))
                except OSError as error:
                    raise RuntimeError(f"process {self._process.pid} is dead") from error
                return self._process.answer()

        return call


class Ranks:
    """The trainer ranks; `handles[rank].push_weights.remote(...)` is a future. A context manager."""

    def __init__(self, options: RankOptions) -> None:
        store = create_group_store(HOST, TIMEOUT_S)
        self._store = store
        count = options.layout.world_size
        self.processes = [Process(_serve_rank, options, rank, store.port) for rank in range(count)]
        for process in self.processes:
            process.answer()
        self.handles = [Threaded(_RankCalls(process)) for process in self.processes]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank at once."""
        futures = [getattr(handle, method).remote(*args) for handle in self.handles]
        return [future.result() for future in futures]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.close()


class DividedEngine:
    """An engine of several ranks, each a receiver: a request goes to all, as an engine passes it on to its ranks."""

    def __init__(self, ranks: Sequence[AttachedEngine]) -> None:
        self.ranks = list(ranks)

    def init_weights_update_group(self, *, rank_offset: int, **payload: Any) -> None:
        """Each rank under its own number."""
        each = [{"rank_offset": rank_offset + place} for place in range(len(self.ranks))]
        self._ask("init_weights_update_group", each, **payload)

    def update_weights_from_tensor(self, serialized: list[str], **payload: Any) -> None:
        """Each rank its own payload."""
        self._ask(
            "update_weights_from_tensor",
            [{"serialized": [payload_of_rank]} for payload_of_rank in serialized],
            **payload,
        )

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method.startswith("_") or method == "ranks":
            raise AttributeError(method)
        return lambda *args, **payload: self._ask(method, [{}] * len(self.ranks), *args, **payload)

    def _ask(self, method: str, each: Sequence[dict[str, Any]], *args: Any, **payload: Any) -> None:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            calls = [
                pool.submit(getattr(rank, method), *args, **payload, **rank_payload)
                for rank, rank_payload in zip(self.ranks, each, strict=True)
            ]
        for call in calls:
            call.result()


class Receivers:
    """Engines of these sizes, a process a rank, as targets of a push. A context manager."""

    def __init__(self, sizes: Sequence[int], *, hashes: bool = False, device: str = "cpu", ep_size: int = 1) -> None:
        self.processes = [[Process(_serve_receiver, hashes, device) for _ in range(size)] for size in sizes]
        self.engines = [
            DividedEngine([AttachedEngine(i, f"http://{HOST}:{process.answer()}", 1) for process in processes])
            for i, processes in enumerate(self.processes)
        ]
        self.targets = [
            EngineTarget(i, Threaded(engine), "", tuple(range(size)), ep_size=ep_size if size > 1 else 1)
            for i, (engine, size) in enumerate(zip(self.engines, sizes, strict=True))
        ]

    def received(self) -> list[list[dict[str, Any]]]:
        """Of each rank of each engine; see `Receiver.received`."""
        return [[rank.post("/received") for rank in engine.ranks] for engine in self.engines]

    def __enter__(self) -> Receivers:
        return self

    def __exit__(self, *_: object) -> None:
        for processes in self.processes:
            for process in processes:
                process.close()
