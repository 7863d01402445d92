"""A push between real processes in real groups: every byte, in any layout; and what happens when one of them dies."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fusionrl.models import convert
from fusionrl.models.convert import quantized
from fusionrl.models.families import hf_shapes, model_rules
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.push_plan import BUFFERS, EngineTarget, push_tensors
from fusionrl.weights.push import Push
from tests.trainer import hf_models
from tests.weights.faults import Faulty
from tools.bench.push_processes import Process, RankOptions, Ranks, Receivers, whole_tensor
from tools.threaded import Threaded


def shape_of(family: str, **values: Any) -> ModelShape:
    config = hf_models.config_of(family, False, vocab_size=121, num_hidden_layers=4, **values)
    return shape_from_hf_config(json.loads(config.to_json_string(use_diff=False)))


def hashes(shape: ModelShape, seed: int, spec: BlockFp8 | None = None) -> dict[str, str]:
    """Name → SHA-256 of what an engine should get, from the whole tensors."""
    found: dict[str, Any] = {}
    for rule in model_rules(shape).values():
        dtype = torch.float32 if rule.buffer else torch.bfloat16
        # The ranks hold bf16, as a trainer that trains in it; a buffer is exact in the wider precision.
        whole = whole_tensor(rule, torch.bfloat16, seed).to(dtype)
        parts = zip(rule.hf, convert.take_apart(rule, whole), strict=True)
        for name, tensor in quantized(parts, spec):
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            found.setdefault(name, hashlib.sha256()).update(raw)  # of a stack one expert after another
    return {name: hash_of_bytes.hexdigest() for name, hash_of_bytes in found.items()}


def push(ranks: Ranks, targets: list[EngineTarget], transport: str, version: int, timeout_s: float = 60.0) -> Any:
    return Push(ranks.handles, targets, version, timeout_s).from_memory([], transport, "abort")


def assert_received(receivers: Receivers, shape: ModelShape, version: int) -> None:
    """Every rank of every engine has all weights of the version, and continues."""
    for facts in [rank for engine in receivers.received() for rank in engine]:
        assert (facts["version"], facts["is_released"]) == (str(version), True)
        assert facts["hashes"] == hashes(shape, version)


@pytest.fixture(scope="module")
def receivers(forkserver: None) -> Iterator[Receivers]:
    """An engine of two ranks that divides its experts, and one of one rank."""
    with Receivers([2, 1], hashes=True, ep_size=1) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "is_fp8"),
    [
        ("qwen3", TrainerLayout(4, tp=2, pp=2, vpp=2), False),
        ("glm4_moe", TrainerLayout(4, tp=2, ep=2, pp=2), False),
        ("deepseek_v3", TrainerLayout(2, tp=2), True),
    ],
    ids=str,
)
def test_every_byte_arrives(receivers: Receivers, family: str, layout: TrainerLayout, is_fp8: bool) -> None:
    """Also of weights that the sources quantise, and their scales."""
    shape = shape_of(family)
    names = [name for name in hf_shapes(shape) if ".self_attn." in name or ".down_proj." in name]
    names = [name for name in names if "norm" not in name]
    spec = BlockFp8((24, 16), ue8m0=False, names=frozenset(names)) if is_fp8 else None
    whole = sum(tensor.sent_bytes for tensor in push_tensors(shape, lambda _: 0, "bfloat16", spec))
    if spec is None:
        assert whole == sum(rule.numel * (4 if rule.buffer else 2) for rule in model_rules(shape).values())
    divided = EngineTarget(0, receivers.targets[0].handle, "", (0, 1), ep_size=2)
    with Ranks(RankOptions(shape, layout, buffer_size=7_000, quantization=spec)) as ranks:
        for version, transport in enumerate(("broadcast", "broadcast", "ipc", "ipc"), start=1):
            ranks.call("fill", version)
            targets = receivers.targets
            if transport == "ipc" and shape.num_experts:
                targets = [divided, targets[1]]
            metrics = push(ranks, targets, transport, version)
            want = hashes(shape, version, spec)
            two, (one,) = receivers.received()
            assert one["hashes"] == want
            assert {**two[0]["hashes"], **two[1]["hashes"]} == want
            if targets[0] is divided:
                for rank, facts in enumerate(two):
                    names = [name.split(".experts.")[1] for name in facts["hashes"] if ".experts." in name]
                    assert {int(name.split(".")[0]) for name in names} == set(range(rank * 4, rank * 4 + 4))
            else:
                assert two[0]["hashes"] == two[1]["hashes"] == want
            for facts in (one, *two):
                assert facts["version"] == str(version)
                assert facts["is_released"]
            assert metrics["sync/bytes"] == whole == one["bytes"]
            assert metrics["sync/calls"] == one["calls"] + two[0]["calls"] == 2 * metrics["sync/buckets"]
            assert metrics["sync/buckets"] > whole / 7_000
            assert 0 < metrics["sync/transfer_s"] <= metrics["sync/pause_s"] <= metrics["perf/time_sync_s"]
        facts = ranks.call("plan_facts")[0]
        assert len(facts["sources"]) == layout.pp * layout.ep


@pytest.mark.slow
def test_stacks_of_experts_that_ranks_divide_arrive_whole(receivers: Receivers) -> None:
    shape = shape_of("gpt_oss")
    with Ranks(RankOptions(shape, TrainerLayout(2, ep=2), buffer_size=7_000)) as ranks:
        for version, transport in enumerate(("broadcast", "ipc"), start=1):
            ranks.call("fill", version)
            push(ranks, receivers.targets, transport, version)
            assert_received(receivers, shape, version)


@pytest.mark.slow
def test_an_engine_of_another_node_gets_its_weights_by_value(receivers: Receivers) -> None:
    """It shares no memory with the source."""
    shape = shape_of("qwen3")
    targets = [replace(target, node_id=node) for target, node in zip(receivers.targets, "ab", strict=True)]
    with Ranks(RankOptions(shape, TrainerLayout(2), buffer_size=7_000, nodes=("a", "b"))) as ranks:
        ranks.call("fill", 5)
        push(ranks, targets, "ipc", 5)
        assert_received(receivers, shape, 5)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_an_engine_that_is_left_out_gets_nothing_and_the_groups_stay(receivers: Receivers, transport: str) -> None:
    """As engines that only evaluate, which get the weights of some steps."""
    shape = shape_of("qwen3")
    want, groups = {seed: hashes(shape, seed) for seed in (1, 2)}, []
    with Ranks(RankOptions(shape, TrainerLayout(2, pp=2), buffer_size=7_000)) as ranks:
        for version in (1, 2, 3, 4):
            ranks.call("fill", 1 + version % 2)
            push(ranks, receivers.targets[: 1 + version % 2], transport, version)
            (first, second), (third,) = receivers.received()
            assert first["hashes"] == second["hashes"] == want[1 + version % 2] and first["version"] == str(version)
            assert (third["version"], third["bytes"] > 0) == ((str(version), True) if version % 2 else (None, False))
            groups.append((first["groups"], third["groups"]))
    assert groups[1] == groups[2] == groups[3], "made at the first push of each kind, and kept"
    assert len(groups[3][0]) - len(groups[0][0]) == (2 if transport == "broadcast" else 0), "one a source"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_what_is_frozen_is_sent_once_to_each_process(receivers: Receivers, transport: str) -> None:
    """And again to an engine that has restarted, and so to all that the push reaches."""
    shape = shape_of("qwen3")
    frozen = frozenset(name for name in hf_shapes(shape) if "layers.0." in name or "embed" in name)
    with Ranks(RankOptions(shape, TrainerLayout(2, pp=2), buffer_size=7_000, frozen=frozen)) as ranks:
        targets = receivers.targets
        restarted = [replace(targets[0], num_restarts=9), targets[1]]
        pushes = [(targets, True), (targets, False), (restarted, True), (restarted, False)]
        for version, (to, is_whole) in enumerate(pushes):
            ranks.call("fill", version)
            push(ranks, to, transport, version)
            want = {name: x for name, x in hashes(shape, version).items() if is_whole or name not in frozen}
            for facts in [rank for engine in receivers.received() for rank in engine]:
                assert (facts["hashes"], facts["version"]) == (want, str(version))


PHASES = {
    "joining": ("init_weights_update_group", 1),
    "pause": ("pause", 1),
    "begin": ("begin_weight_update", 1),
    "first bucket": ("update_weights_from_distributed", 1),
    "middle": ("update_weights_from_distributed", 9),
    "end": ("end_weight_update", 1),
}
LIMIT_S = 45.0  # far over what it takes, as machines are busy


def struck(receivers: Receivers, phase: str, victim: int, pid: int, transport: str) -> list[EngineTarget]:
    """The targets; on a call of that phase to engine `victim` the process `pid` dies."""
    method, number = PHASES[phase]
    if transport == "ipc":
        method = method.replace("from_distributed", "from_tensor")
    targets = list(receivers.targets)
    faulty = Threaded(Faulty(receivers.engines[victim], method, number, pid))
    targets[victim] = replace(targets[victim], handle=faulty)
    return targets


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_an_engine_that_dies_in_any_phase_ends_the_push_and_not_the_next_one(transport: str) -> None:
    """It is named, within the time limit; the other engine goes on, and gets the next version whole."""
    shape = shape_of("qwen3")
    layout = TrainerLayout(4, tp=2, pp=2) if transport == "broadcast" else TrainerLayout(2, pp=2)
    with Ranks(RankOptions(shape, layout, buffer_size=3_000, timeout_s=LIMIT_S)) as ranks:
        version, made = 0, set[int]()
        for phase in PHASES if transport == "broadcast" else ("begin", "first bucket", "end"):
            with Receivers([1, 1], hashes=True) as receivers:
                dying = receivers.processes[0][0].process
                # Both are other processes than those of the phase before.
                receivers.targets = [replace(target, num_restarts=version) for target in receivers.targets]
                targets = struck(receivers, phase, 0, receivers.processes[0][0].pid, transport)
                start = time.monotonic()
                with pytest.raises(RuntimeError, match="engine 0") as raised:
                    push(ranks, targets, transport, version + 1, LIMIT_S)
                assert time.monotonic() - start < LIMIT_S, (phase, raised.value)
                dying.join(5)
                assert not dying.is_alive(), phase
                version += 2
                ranks.call("fill", version)
                push(ranks, receivers.targets[1:], transport, version, LIMIT_S)
                facts = receivers.engines[1].ranks[0].post("/received")
                assert (facts["version"], facts["is_released"]) == (str(version), True), phase
                assert facts["hashes"] == hashes(shape, version), phase
                made = made or segments(ranks)
                assert len(made) == 2 * BUFFERS, phase
                assert segments(ranks) == made, phase  # the same, as living engines have them mapped


def segments(ranks: Ranks) -> set[int]:
    """Inodes of the shared memory that the ranks have."""
    paths = [path for process in ranks.processes for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {path.stat().st_ino for path in paths if os.readlink(path).startswith("/memfd:fusionrl-weights")}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_an_engine_that_refuses_gets_the_next_version(receivers: Receivers, transport: str) -> None:
    """The same processes again on all sides: ranks that have failed and ranks that have not begin anew together."""
    shape = shape_of("qwen3")
    method = {"broadcast": "update_weights_from_distributed", "ipc": "update_weights_from_tensor"}[transport]
    methods = [method, "begin_weight_update"] + ["init_weights_update_group"] * (transport == "broadcast")
    with Ranks(RankOptions(shape, TrainerLayout(4, tp=2, pp=2), buffer_size=3_000, timeout_s=LIMIT_S)) as ranks:
        for version, method in enumerate(methods[::-1], start=1):
            two, one = receivers.targets
            refusing = replace(one, handle=Threaded(Faulty(receivers.engines[1], method)))
            with pytest.raises(RuntimeError, match=f"engine 1.*no {method} today"):
                push(ranks, [two, refusing], transport, 100 + version, LIMIT_S)
            ranks.call("fill", version)
            push(ranks, [two, one], transport, version, LIMIT_S)
            assert_received(receivers, shape, version)


@pytest.mark.slow
def test_a_trainer_rank_that_dies_ends_the_push() -> None:
    """With an error within the time limit; the engines are released, and get the weights of trainers that live."""
    shape = shape_of("qwen3")
    options = RankOptions(shape, TrainerLayout(4, tp=2, pp=2), buffer_size=3_000, timeout_s=LIMIT_S)
    with Receivers([1, 1], hashes=True) as receivers, ExitStack() as stack:
        ranks = stack.enter_context(Ranks(options))
        for version, phase in enumerate(("joining", "first bucket", "middle", "end"), start=1):
            # A rank of the second stage that only sends its parts to the source there.
            targets = struck(receivers, phase, 1, ranks.processes[3].pid, "broadcast")
            start = time.monotonic()
            if phase == "end":
                push(ranks, targets, "broadcast", 100, LIMIT_S)  # nobody needs it any more
            else:
                with pytest.raises(RuntimeError, match="trainer"):
                    push(ranks, targets, "broadcast", 100, LIMIT_S)
            assert time.monotonic() - start < LIMIT_S, phase
            stack.pop_all().close()  # the run ends
            ranks = stack.enter_context(Ranks(options))
            ranks.call("fill", version)
            receivers.received()
            push(ranks, receivers.targets, "broadcast", version, LIMIT_S)
            assert_received(receivers, shape, version)


def test_a_process_that_has_ended_is_not_killed(forkserver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may have its number by now."""
    process, kill = Process(id), Mock()
    assert wait([process.process.sentinel], 60.0)
    monkeypatch.setattr(os, "kill", kill)
    process.close()
    kill.assert_not_called()
