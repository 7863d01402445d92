"""The plan of a weight push: who feeds whom, what travels together, in which order; simulated over random layouts."""

import itertools
import json
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusionrl.models.families import hf_shapes, model_rules
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape, shape_from_hf_config
from fusionrl.plan import push_plan as push
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.weights.gather import buckets
from tests.trainer import hf_models


def target(index: int, bundles: tuple[int, ...]) -> push.EngineTarget:
    return push.EngineTarget(index, None, "a", bundles)


def test_on_gpus_an_engine_rank_reads_from_its_own_device() -> None:
    feeds = push.plan_feeds([target(0, (0, 1)), target(1, (2, 3))], trainer_bundles=[3, 2, 1, 0])
    assert [(feed.leader, feed.senders) for feed in feeds] == [(3, (3, 2)), (1, (1, 0))]
    with pytest.raises(ValueError, match=r"-weight-transport ipc: engine 1 has devices \[2\] without a trainer"):
        push.plan_feeds([target(0, (0,)), target(1, (1, 2))], [0, 1])


DTYPES = (torch.float32, torch.bfloat16)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from(DTYPES)), max_size=25), st.integers(1, 400))
def test_buckets(sizes: list[tuple[int, torch.dtype]], max_bytes: int) -> None:
    tensors = [(str(i), torch.zeros(n, dtype=dtype)) for i, (n, dtype) in enumerate(sizes)]
    made = list(buckets(iter(tensors), max_bytes))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in tensors]
    for bucket in made:
        assert bucket and (len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= max_bytes)
        for i, (_, tensor) in enumerate(bucket):  # it begins where its values may
            assert sum(before.nbytes for _, before in bucket[:i]) % tensor.element_size() == 0
    # No two neighbours could have been one.
    for left, right in itertools.pairwise(made):
        size = sum(tensor.nbytes for _, tensor in left)
        assert size + right[0][1].nbytes > max_bytes or size % right[0][1].element_size()


def test_one_bucket_of_tensors_is_alive_at_a_time() -> None:
    """The next tensor is gathered only when the bucket before has been handed over."""
    gathered: list[int] = []

    def tensors() -> Any:
        for i in range(6):
            gathered.append(i)
            yield str(i), torch.zeros(10)

    made = buckets(tensors(), max_bytes=80)
    next(made)
    assert gathered == [0, 1, 2]


@pytest.mark.parametrize("limit", [1, 15, 50, 200])
def test_what_an_engine_joins_comes_in_one_bucket(limit: int) -> None:
    """SGLang drops a q_a_proj whose kv_a_proj_with_mqa comes with another request."""
    shape = SHAPES["deepseek_v3"]
    tensors = [(name, torch.zeros(sizes)) for name, sizes in hf_shapes(shape).items()]
    made = list(buckets(iter(tensors), limit * 64))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in tensors]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        pair = {prefix + "q_a_proj.weight", prefix + "kv_a_proj_with_mqa.weight"}
        assert sum(bool(pair & {name for name, _ in bucket}) for bucket in made) == 1


SHAPES = {
    family: shape_from_hf_config(
        json.loads(hf_models.config_of(family, False, num_hidden_layers=4).to_json_string(use_diff=False))
    )
    for family in ("qwen3", "qwen2_moe", "glm4", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
}


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    layout: TrainerLayout
    max_bytes: int
    quantization: BlockFp8 | None = None

    def tensors(self) -> list[push.PushTensor]:
        stages = stage_layers(self.layout, self.shape.num_layers, {})
        return push.push_tensors(self.shape, push.stage_of_rule(stages), "bfloat16", self.quantization)

    def plan(self) -> push.PushPlan:
        return push.plan_push(self.tensors(), self.layout, 2, self.max_bytes, self.shape.num_experts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(sorted(SHAPES)))
    tp, pp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    vpp = draw(st.sampled_from([1, 4 // pp])) if pp in (2,) else 1
    dp = draw(st.sampled_from([1, 2, 3]))
    ep, etp = (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, tp]))) if SHAPES[family].num_experts else (1, 1)
    etp = etp if SHAPES[family].divides_experts else 1
    assume((tp * cp * dp) % (ep * etp) == 0)
    layout = TrainerLayout(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vpp=vpp)
    names = frozenset(name for name in hf_shapes(SHAPES[family]) if name.endswith(("proj.weight", "with_mqa.weight")))
    # Of blocks of two values the scales take more room than the values in bf16.
    block = draw(st.sampled_from([None, (16, 16), (1, 2)]))
    quantization = block and BlockFp8(block, ue8m0=False, names=names)
    return Case(SHAPES[family], layout, draw(st.integers(500, 40_000)), quantization)


@settings(max_examples=25)
@given(cases())
def test_every_tensor_is_sent_once_and_comes_from_ranks_that_hold_it(case: Case) -> None:
    plan = case.plan()
    wanted = {name: prod(sizes) for name, sizes in hf_shapes(case.shape).items()}
    sent = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
    assert sorted(t.name for t in sent) == sorted(wanted)
    assert sum(t.nbytes for t in sent) == sum((4 if t.rule.buffer else 2) * wanted[t.name] for t in sent)
    held = holdings(case)
    for bucket in plan.buckets:
        for tensor in bucket.tensors:
            split = tensor.rule.split != "replicated"
            for place, member in enumerate(bucket.members):
                if tensor.rule.stack:
                    its = [i for i in range(tensor.shape[0]) if tensor.rule.of_expert(i) in held[member]]
                    count = tensor.shape[0] // case.layout.ep
                    assert its == [*range(place * count, place * count + count)]
                    continue
                assert held[member][tensor.rule.megatron] == (place if split else held[member][tensor.rule.megatron])
            over = "ep" if tensor.rule.stack else "tp" if tensor.expert is None else "etp"
            size = getattr(case.layout, over)
            assert len(bucket.members) == size, "of all parts, none is missing"


def holdings(case: Case) -> list[dict[str, int]]:
    """Rank → Megatron name → place among the ranks that divide it: tp, cp, dp (experts: etp, ep, dp), pp outermost."""
    layout, found = case.layout, []
    stages = stage_layers(layout, case.shape.num_layers, {})
    per_stage = layout.world_size // layout.pp
    for rank in range(layout.world_size):
        stage, inner = divmod(rank, per_stage)
        tp_place, etp_place, ep_place = inner % layout.tp, inner % layout.etp, inner // layout.etp % layout.ep
        mine: dict[str, int] = {}
        for name, rule in model_rules(case.shape).items():
            if "layers." in name:
                is_here = int(name.split(".")[2]) in stages[stage]
            else:
                is_here = stage == (0 if name.startswith("embedding") else layout.pp - 1)
            if rule.expert is not None:
                is_here &= rule.expert // (case.shape.num_experts // layout.ep) == ep_place
            if is_here:
                mine[name] = tp_place if rule.expert is None else etp_place
        found.append(mine)
    return found


@settings(max_examples=25)
@given(cases())
def test_buckets_are_as_large_as_they_may_be_and_of_one_dtype(case: Case) -> None:
    plan = case.plan()
    assert [bucket.number for bucket in plan.buckets] == list(range(len(plan.buckets)))
    for bucket in plan.buckets:
        names = [tensor.name for tensor in bucket.tensors]
        joined = len(names) == 2 and names[0].endswith(push.TOGETHER[0]) and names[1].endswith(push.TOGETHER[1])
        assert max(bucket.nbytes, bucket.sent_bytes) <= case.max_bytes or len(names) == 1 or joined
        for tensor in bucket.tensors if case.quantization else ():
            if tensor.name in case.quantization.names:
                rows, columns = tensor.shape
                down, across = case.quantization.block
                assert tensor.sent_bytes == rows * columns + 4 * ceil(rows / down) * ceil(columns / across)
            else:
                assert tensor.sent_bytes == tensor.nbytes
        assert len({tensor.dtype for tensor in bucket.tensors}) == 1
        together = [name for name in names if name.endswith(push.TOGETHER)]
        assert len(together) % 2 == 0 or case.shape.attention[0].kind != "latent"


@settings(max_examples=25)
@given(cases(), st.booleans(), st.randoms(use_true_random=False))
def test_no_rank_waits_for_ever_and_none_holds_more_than_planned(case: Case, is_ordered: bool, random: Any) -> None:
    """Every rank's two threads as they run in `send`, in random interleavings, against the bound of `peak_bytes`."""
    plan = case.plan()
    early = [plan.gathers(rank)[0] for rank in range(case.layout.world_size)]
    todo = [early[rank] + plan.gathers(rank)[1] for rank in range(case.layout.world_size)]
    assert all(len([b for b in part if b.source == rank]) <= push.BUFFERS for rank, part in enumerate(early))
    ready: dict[int, list[Any]] = {rank: [] for rank in plan.sources}
    sent: list[int] = []
    gathered = [0] * case.layout.world_size
    while len(sent) < len(plan.buckets):
        moves: list[tuple[str, Any]] = []
        for bucket in plan.buckets:
            at = [gathered[rank] < len(todo[rank]) and todo[rank][gathered[rank]] is bucket for rank in bucket.members]
            if all(at) and len(ready[bucket.source]) < push.BUFFERS:
                moves.append(("gather", bucket))
        for queue in ready.values():
            if queue and (not is_ordered or queue[0].number == len(sent)):
                moves.append(("send", queue[0]))
        assert moves, f"stuck after {len(sent)} of {len(plan.buckets)} buckets"
        kind, bucket = random.choice(moves)
        if kind == "send":
            ready[bucket.source].remove(bucket)
            sent.append(bucket.number)
            continue
        ready[bucket.source].append(bucket)
        held = sum(max(b.nbytes, b.sent_bytes) for b in ready[bucket.source]) + bucket.gathered_bytes
        held += bucket.sent_bytes if bucket.is_quantised else 0
        assert held <= plan.peak_bytes(bucket.source)
        for rank in bucket.members[1:]:
            assert bucket.part_bytes(rank) <= plan.peak_bytes(rank)
        for rank in bucket.members:
            gathered[rank] += 1
    assert gathered == [len(part) for part in todo]
    largest = max(t.buffer_bytes for t in case.tensors()) * 2  # two of `push.TOGETHER`
    bound = max(case.max_bytes, largest)
    count = push.BUFFERS + 1 + (2 if case.quantization else 0)
    assert all(plan.peak_bytes(rank) <= count * bound for rank in range(case.layout.world_size))


def test_the_work_is_spread_over_stages_and_expert_ranks() -> None:
    plan = Case(SHAPES["qwen3_moe"], TrainerLayout(8, tp=2, pp=2, ep=2), 3_000).plan()
    assert plan.sources == (0, 1, 4, 5), "experts of the second part are on the ranks beside"
    experts = [b for b in plan.buckets if any(t.expert is not None for t in b.tensors)]
    assert {b.members for b in experts} == {(0,), (1,), (4,), (5,)}
    # At any time all are at work: among neighbours in the order every source comes soon.
    for i in range(0, len(plan.buckets) - 9, 3):
        assert {b.source for b in plan.buckets[i : i + 10]} == {0, 1, 4, 5}


def test_an_engine_that_divides_its_experts_keeps_its_own() -> None:
    tensors = Case(SHAPES["qwen3_moe"], TrainerLayout(1), 1).tensors()
    engine = push.EngineTarget(0, None, "a", (0, 1, 2, 3), ep_size=2)
    for rank in range(4):
        kept = {t.expert for t in tensors if push.own_experts(t, engine, rank, 4)}
        assert kept == {None, 0, 1} if rank < 2 else kept == {None, 2, 3}
    whole = push.EngineTarget(0, None, "a", (0, 1))
    assert all(push.own_experts(t, whole, 1, 4) for t in tensors)


def test_a_plan_says_what_it_takes() -> None:
    """Against numbers worked out by hand: two stages of two ranks, two engines."""
    shape = SHAPES["qwen3"]
    tensors = push.push_tensors(shape, push.stage_of_rule([[0, 1], [2, 3]]), "bfloat16")
    plan = push.plan_push(tensors, TrainerLayout(4, tp=2, pp=2), 2, 1 << 20)
    layer = 2 * (32 + 32 + 64 * 32 + 2 * 32 * 32 + 16 + 16 + 32 * 64 + 3 * 48 * 32)
    table = 2 * 120 * 32
    assert [plan.sent_bytes(rank) for rank in plan.sources] == [table + 2 * layer, 2 * layer + 2 * 32 + table]
    assert plan.num_calls == 4
    divided = plan.sent_bytes(0) - 2 * 2 * (32 + 32 + 16 + 16)
    assert plan.peak_bytes(0) == plan.sent_bytes(0) + divided // 2, "one bucket: one buffer, and half of it gathered"
    assert plan.peak_bytes(1) == divided // 2
    what, who = plan.describe()
    mb = [f"{plan.sent_bytes(rank) / 1e6:.1f} MB" for rank in (0, 2)]
    assert what.startswith(f"2 buckets of at most {mb[0]}, 4 calls; extra memory at most ")
    assert who == f"sent by rank 0 {mb[0]}, rank 2 {mb[1]}"
