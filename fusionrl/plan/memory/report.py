"""The memory that a plan takes on each device and node, as bars; alternating phases are shown side by side.

A bar is what stands in one memory at one moment. The largest bar is compared with the device's memory (on a CPU: all
processes of a node with the node's). Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fusionrl.config.config import Config
from fusionrl.config.parts import needs_reference
from fusionrl.models.shape import ModelShape
from fusionrl.plan.auxiliary import auxiliary_config
from fusionrl.plan.batch import BatchPlan
from fusionrl.plan.defaults import layer_impl
from fusionrl.plan.devices import GIB, Machine
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.memory.activations import ActivationOptions, Packing, Recompute
from fusionrl.plan.memory.engine import EngineMemory, engine_memory
from fusionrl.plan.memory.states import StateOptions
from fusionrl.plan.memory.trainer import BatchOptions, StageMemory, trainer_memory
from fusionrl.plan.push import BUFFERS, plan_for_layout

if TYPE_CHECKING:
    from fusionrl.plan.plan import Plan

# Of a process on a GPU: CUDA's context, kernels and NCCL's buffers; what the allocator cannot use, of the rest.
CONTEXT_BYTES, FRAGMENTATION = 1.5 * GIB, 0.04
# glibc keeps more of what was freed (docs/memory.md).
CPU_FRAGMENTATION = 0.10
# Resident memory of a process with nothing in it, measured on a CPU (docs/memory.md).
TRAINER_PROCESS, ENGINE_PROCESS, OTHER_PROCESSES = 0.8 * GIB, 2.0 * GIB, 2.0 * GIB
# On GPU nodes, where CUDA's libraries are loaded; assumed.
GPU_PROCESS = 4.0 * GIB
# Of a rollout in the Buffer: tokens, masks and log-probs as Python numbers.
BYTES_A_SAMPLED_TOKEN = 150
LOCAL_PADDING = 1.25  # places of the local attention's padded calls, for each token of unlike sequences
GENERATION = "generation"
NEAR = 0.95  # of a memory: an estimate this close may be wrong either way


@dataclass(frozen=True)
class Bar:
    """The contents of one memory at one moment: (part, bytes)."""

    name: str
    parts: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        return sum(size for _, size in self.parts)

    def describe(self) -> str:
        """Its total and its parts, those of at least 1 % of it."""
        large = [(part, size) for part, size in self.parts if size >= max(self.total / 100, 1)]
        shown = [f"{part} {gib(size)}" for part, size in large]
        rest = self.total - sum(size for _, size in large)
        if rest >= 0.005 * 2**30:  # what would show as 0.00 is left out
            shown.append(f"other {gib(rest)}")
        return f"{gib(self.total)} GiB = {' + '.join(shown)}"


def gib(size: float) -> str:
    """In GiB, with two digits after the point, or more where these would be 0."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 or not value else f"{value:.4f}"


@dataclass(frozen=True)
class MemoryReport:
    """The estimate of a plan.

    device_bars  of one device of the worst stage, a bar a phase; empty on a CPU
    host_bars    of one node
    engine       of one device of an engine; None: no engines, or a device whose memory is not known
    machine      what they are compared with; None: nothing
    longest      tokens of the longest sample
    push         bytes that a weight push takes on a rank
    change       the least change found by which it fits; None: it fits, or none was found or looked for
    """

    device_bars: tuple[Bar, ...]
    host_bars: tuple[Bar, ...]
    engine: EngineMemory | None
    machine: Machine | None
    longest: int
    push: float
    change: str | None = None

    @property
    def worst(self) -> Bar | None:
        """The largest bar of what is compared; that of an engine, which takes what is there, only where it is alone."""
        bars = self.device_bars if self._counts_devices else self.host_bars
        bars = tuple(bar for bar in bars if bar.name != GENERATION) or bars
        return max(bars, key=lambda bar: bar.total, default=None)

    @property
    def _counts_devices(self) -> bool:
        return bool(self.device_bars)

    @property
    def limit(self) -> float | None:
        """Bytes that `worst` is compared with."""
        if self.machine is None:
            return None
        return self.machine.device_memory if self._counts_devices else self.machine.host_memory

    @property
    def starved(self) -> str | None:
        """Explain why an engine has no room although the devices have."""
        engine = self.engine
        if engine is None or engine.fraction is None or engine.kv_tokens >= self.longest:
            return None
        return (
            f"the engine's KV cache has room for {max(engine.kv_tokens, 0)} tokens, and a sample may have"
            f" {self.longest}: weights take {gib(engine.weights)} GiB of {engine.fraction:.2f} of the device"
        )

    @property
    def fits(self) -> bool | None:
        """None: there is nothing to compare with."""
        worst, limit = self.worst, self.limit
        if self.starved is not None or self._is_over(self.host_bars, self._host_limit):
            return False
        return None if worst is None or limit is None else worst.total <= limit

    @property
    def _host_limit(self) -> float | None:
        return self.machine.host_memory if self.machine is not None else None

    @staticmethod
    def _is_over(bars: Sequence[Bar], limit: float | None) -> bool:
        return limit is not None and any(bar.total > limit for bar in bars)

    def verdict(self) -> str:
        """One line: whether it fits, the worst moment, and the least change that fits."""
        worst, limit, machine = self.worst, self.limit, self.machine
        if worst is None or machine is None or limit is None:
            return "not compared: the memory of the devices is not known"
        cure = f"; it would with {self.change}" if self.change else "; no change that was tried fits: take more devices"
        if self.starved is not None:
            return f"DOES NOT FIT: {self.starved}{cure}"
        told = f"{gib(worst.total)} of {gib(limit)} GiB ({machine.kind}; worst: {worst.name})"
        if worst.total > limit:
            return f"DOES NOT FIT: {told}{cure}"
        over = next((bar for bar in self.host_bars if self._is_over((bar,), self._host_limit)), None)
        if over is not None:
            assert self._host_limit is not None
            return (
                f"DOES NOT FIT: {gib(over.total)} of {gib(self._host_limit)} GiB of a node's host memory"
                f" ({over.name}){cure}"
            )
        near = ", close enough that it may not" if worst.total > NEAR * limit else ""
        return f"fits: {told}{near}"

    def lines(self) -> list[str]:
        """The bars, for plan.txt."""
        lines = [f"a device, {bar.name}: {bar.describe()}" for bar in self.device_bars]
        lines += [f"a node, {bar.name}: {bar.describe()}" for bar in self.host_bars]
        if self.engine is not None:
            lines.append(
                f"a device of an engine: weights {gib(self.engine.weights)} + KV cache {gib(self.engine.pool)} GiB ="
                f" {max(self.engine.kv_tokens, 0)} tokens an engine ({self.engine.kv_bytes / 1024:.1f} KiB each)"
            )
        return lines


@dataclass(frozen=True)
class _Group:
    """One group of trainers: its stages, and how many further sets of weights each rank keeps in host memory."""

    name: str
    stages: tuple[StageMemory, ...]
    bundles: tuple[int, ...]
    num_sets: int

    def stage_of(self, rank: int) -> StageMemory:
        return self.stages[rank * len(self.stages) // len(self.bundles)]

    def most(self, what: Literal["training", "scoring"]) -> StageMemory:
        if what == "training":
            return max(self.stages, key=lambda stage: stage.training)
        return max(self.stages, key=lambda stage: stage.states.on_device + stage.states.weights + stage.scoring)


def memory_report(
    plan: Plan, config: Config, machine: Machine | None, imbalance: float = 1.0, push: float | None = None
) -> MemoryReport:
    """The estimate of `plan`.

    Args:
        plan: the plan; its own `memory` is not read.
        config: what it was made from.
        machine: what to compare with.
        imbalance: of the experts, see `ActivationOptions`.
        push: bytes of a weight push, where they are known; to work them out takes seconds for a large model.
    """
    groups = _groups(plan, config, machine is None or machine.has_fused_layers, imbalance)
    kept = _beside_engines(plan, config, groups)
    engine = _engine(plan, config, machine, kept)
    if push is None:
        push = _push_bytes(plan, config) if plan.transport else 0.0
    longest = longest_sample(config, plan.shape)
    if plan.device == "cpu":
        bars = _cpu_bars(plan, config, groups, engine, push)
        return MemoryReport((), bars, engine, machine, longest, push)
    device_bars = _device_bars(plan, config, groups, engine, push, kept)
    return MemoryReport(device_bars, _host_bars(plan, config, groups), engine, machine, longest, push)


def longest_sample(config: Config, shape: ModelShape) -> int:
    """Tokens of the longest sample that the flags allow."""
    rollout, data = config.rollout, config.data
    cap = config.train.max_tokens_per_gpu * config.model.context_parallel_size
    if rollout.rollout_max_context_len is not None:
        return min(rollout.rollout_max_context_len, shape.max_position_embeddings)
    if config.run.mode == "sft" or rollout.rollout_max_response_len is None:
        return min(cap, shape.max_position_embeddings)
    asked = (data.rollout_max_prompt_len or 1) + rollout.rollout_max_response_len
    return min(asked, shape.max_position_embeddings)


def _groups(plan: Plan, config: Config, has_fused_layers: bool, imbalance: float) -> list[_Group]:
    if plan.layout is None:
        return []
    a, is_rl = config.algorithm, config.run.mode == "rl"
    uses_reference = needs_reference(a)
    num_sets = int(is_rl and uses_reference) + int(is_rl and a.use_opd and a.opd_type == "megatron")
    stages = _stages(plan, config, plan.shape, plan.layout, plan.batch, has_fused_layers, imbalance)
    groups = [_Group("trainers", stages, plan.trainer_bundles, num_sets)]
    other = plan.auxiliary
    if other is not None:
        own = auxiliary_config(config, other.role)
        found = _stages(plan, own, other.shape, other.layout, other.batch, has_fused_layers, imbalance)
        groups.append(_Group(other.role, found, other.bundles, int(other.role == "prm")))
    return groups


def _stages(
    plan: Plan,
    config: Config,
    shape: ModelShape,
    layout: TrainerLayout,
    batch: BatchPlan | None,
    has_fused_layers: bool,
    imbalance: float,
) -> tuple[StageMemory, ...]:
    passed, on_cpu = config.passthrough, plan.device == "cpu"
    impl = layer_impl(config.model.transformer_impl, plan.device, has_fused_layers)
    num_samples, tokens = layout.pp, config.train.max_tokens_per_gpu
    if batch is not None:
        num_samples = -(-batch.global_batch_size // layout.dp)
        # A step of few short samples never fills its micro-batches.
        tokens = min(tokens, -(-num_samples * longest_sample(config, shape) // layout.cp))
    packs = config.train.micro_batch_size != 1
    packing = Packing(
        min(longest_sample(config, shape), config.train.max_tokens_per_gpu * layout.cp),
        cells=LOCAL_PADDING if packs else 1.0,
        is_padded=packs,
    )
    activations = ActivationOptions(
        impl=impl,
        precision=plan.precision,
        on_cpu=on_cpu,
        packing=packing,
        recompute=Recompute.of(passed.transformer),
        sequence_parallel=passed.transformer.get("sequence_parallel", True) is not False,
        imbalance=imbalance,
    )
    custom = config.run.mode == "rl" and config.algorithm.loss_type == "custom_loss"
    # At most: a sample a micro-batch.
    entropy_grad = config.run.mode == "rl" and config.algorithm.entropy_coef > 0
    chunk_size = config.train.log_probs_chunk_size
    options = BatchOptions(tokens, max(num_samples, 1), chunk_size, entropy_grad, custom)
    states = StateOptions.of(plan.precision, passed.optimizer, passed.ddp)
    return trainer_memory(shape, layout, options, states, activations, passed.transformer)


def weight_bytes(plan: Plan) -> float:
    """Bytes of all weights as engines hold them."""
    width = 2 if plan.rollout_dtype == "bf16" else 4
    whole = float(plan.shape.num_parameters * width)
    if plan.quantization is None:
        return whole
    return float(plan.push_bytes)


def _beside_engines(plan: Plan, config: Config, groups: list[_Group]) -> list[tuple[str, float]]:
    """Return the part of the trainers that stays on the engines' devices while these generate."""
    used = {bundle for bundles in plan.engine_bundles for bundle in bundles}
    if plan.device == "cpu" or plan.trainers_give_memory:
        return []
    return [
        (group.name, float(max(stage.states.on_device for stage in group.stages)))
        for group in groups
        if used & set(group.bundles)
    ]


def _engine(plan: Plan, config: Config, machine: Machine | None, kept: list[tuple[str, float]]) -> EngineMemory | None:
    if not plan.num_engines:
        return None
    return engine_memory(
        plan.shape,
        weight_bytes(plan),
        plan.engine_size,
        plan.rollout_dtype,
        config.passthrough.sglang,
        device_memory=machine.device_memory if machine is not None else None,
        on_cpu=plan.device == "cpu",
        resident=sum(size for _, size in kept),
    )


def _push_bytes(plan: Plan, config: Config) -> float:
    """Memory that a weight push takes beside the weights, on the rank that needs most."""
    assert plan.layout is not None
    limit = config.weights.update_weight_buffer_size
    stages = stage_layers(plan.layout, plan.shape.num_layers, config.passthrough.transformer)
    if stages is None or plan.transport == "disk" or (plan.transport == "ipc" and plan.device == "cuda"):
        width = 2 if plan.rollout_dtype == "bf16" else 4
        largest = max(rule_size for rule_size in _tensor_sizes(plan.shape)) * width
        return float(BUFFERS * max(limit, largest) + largest)
    dtype = "float32" if plan.rollout_dtype == "fp32" else "bfloat16"
    push = plan_for_layout(plan.shape, plan.layout, plan.engine_bundles, limit, dtype, stages, plan.quantization)
    return float(max(push.peak_bytes(rank) for rank in push.sources))


def _tensor_sizes(shape: ModelShape) -> list[int]:
    from fusionrl.models.families import model_rules

    return [rule.numel for rule in model_rules(shape).values()]


def _states(stage: StageMemory) -> tuple[tuple[str, float], ...]:
    states = stage.states
    return (("weights", states.weights), ("gradients", states.gradients), ("optimizer", states.optimizer))


def _training(stage: StageMemory) -> tuple[tuple[str, float], ...]:
    flying = f" ({stage.in_flight:g} micro-batches in flight)" if stage.in_flight > 1 else ""
    return (
        *_states(stage),
        (f"activations{flying}", stage.activations),
        (f"{stage.transient_of} for a moment", stage.transient),
    )


def _device_bars(
    plan: Plan,
    config: Config,
    groups: list[_Group],
    engine: EngineMemory | None,
    push: float,
    kept: list[tuple[str, float]],
) -> tuple[Bar, ...]:
    """Bars of GPUs. `kept`: of trainers beside engines that generate."""
    cluster, bars = config.cluster, []
    offloads = plan.trainers_give_memory
    shares_engine = plan.is_colocated and engine is not None
    # Where the engines keep their memory, it stands beside the trainers'.
    resident: list[tuple[str, float]] = []
    if shares_engine and engine is not None and not cluster.offload_rollout:
        resident.append(("engine", engine.total))
    contexts = ("contexts" if shares_engine else "context", CONTEXT_BYTES * (2 if shares_engine else 1))
    for group in groups:
        others = [other for other in groups if other is not group and set(other.bundles) & set(group.bundles)]
        beside = [*resident, contexts]
        if cluster.offload_train == "never":
            beside += [(other.name, other.most("training").states.on_device) for other in others]
        stage = group.most("training")
        bars.append(_with_margin(f"{group.name}, stage {stage.stage}, backward", _training(stage), beside))
        stage = group.most("scoring")
        lent = ("weights of another set", stage.states.weights if group.num_sets else 0)
        parts = (*_states(stage), lent, ("forward", stage.scoring))
        bars.append(_with_margin(f"{group.name}, stage {stage.stage}, log-probs", parts, beside))
    if groups and plan.transport:
        stage = groups[0].most("scoring")
        held = (("weights", float(stage.states.weights)),) if offloads and plan.is_colocated else _states(stage)
        engine_part = [("engine weights", engine.weights)] if shares_engine and engine is not None else []
        bars.append(_with_margin(f"stage {stage.stage}, push", (*held, ("push", push)), [*engine_part, contexts]))
    if engine is not None:
        # Beside its fraction an engine keeps a reserve for activations and graphs; it is given out, not measured.
        parts = (("weights", engine.weights), ("KV cache", engine.pool))
        bars.append(Bar(GENERATION, (*parts, *kept, contexts)))
    return tuple(bars)


def _with_margin(name: str, parts: tuple[tuple[str, float], ...], beside: list[tuple[str, float]]) -> Bar:
    margin = FRAGMENTATION * sum(size for _, size in parts)
    return Bar(name, (*parts, ("fragments", margin), *beside))


def _nodes(plan: Plan, config: Config) -> int:
    """Devices of a node; on one machine all of them are its own."""
    if plan.device == "cpu" and config.cluster.ray_address is None:
        return max(plan.num_bundles, 1)
    return config.cluster.num_gpus_per_node


def _on_node(bundles: Sequence[int], node: int, per_node: int) -> list[int]:
    """Places in `bundles` of those on the node."""
    return [place for place, bundle in enumerate(bundles) if bundle // per_node == node]


def _cpu_bars(
    plan: Plan, config: Config, groups: list[_Group], engine: EngineMemory | None, push: float
) -> tuple[Bar, ...]:
    """Bars of the node that needs most, where all processes share its memory. Nothing is given back between phases but
    what --offload-train writes to files."""
    per_node, found = _nodes(plan, config), []
    away = config.cluster.offload_train == "always" and bool(plan.num_engines)
    for node in range(-(-plan.num_bundles // per_node)):
        ranks = [
            (group, group.stage_of(place)) for group in groups for place in _on_node(group.bundles, node, per_node)
        ]
        num_engines = [bool(_on_node(bundles, node, per_node)) for bundles in plan.all_engine_bundles].count(True)
        devices = [bundle for bundles in plan.all_engine_bundles for bundle in bundles if bundle // per_node == node]
        scorers = [b for scorer in plan.scorers for bundles in scorer.bundles for b in bundles if b // per_node == node]
        processes = TRAINER_PROCESS * len(ranks) + ENGINE_PROCESS * (len(devices) + len(scorers)) + OTHER_PROCESSES
        served = [
            ("engines' weights", engine.weights * len(devices) if engine else 0.0),
            ("KV caches", engine.pool * len(devices) if engine else 0.0),
        ]
        sets = [("reference weights", float(sum(g.num_sets * s.states.weights for g, s in ranks)))]
        fixed = [*served, *sets, ("processes", processes)]
        training = _sum([_training_plain(stage) for _, stage in ranks])
        training = (*training, ("fragments", CPU_FRAGMENTATION * sum(size for _, size in training)))
        states = _sum([_states(stage) for _, stage in ranks])
        where = f"node {node}, " if plan.num_bundles > per_node else ""
        if ranks:
            found.append(Bar(f"{where}training", (*training, *fixed)))
        if plan.transport and ranks:
            found.append(Bar(f"{where}weight push", (*states, ("push", push), *fixed)))
        if num_engines:
            rollout = ("rollout", _rollout_bytes(plan, config))
            found.append(Bar(f"{where}generation", (*(() if away else states), rollout, *fixed)))
    names = dict.fromkeys(bar.name.split(", ")[-1] for bar in found)
    return tuple(max((bar for bar in found if bar.name.endswith(name)), key=lambda bar: bar.total) for name in names)


def _training_plain(stage: StageMemory) -> tuple[tuple[str, float], ...]:
    return (*_states(stage), ("activations", stage.activations), ("backward for a moment", stage.transient))


def _sum(rows: list[tuple[tuple[str, float], ...]]) -> tuple[tuple[str, float], ...]:
    total: dict[str, float] = {}
    for row in rows:
        for name, size in row:
            total[name] = total.get(name, 0.0) + size
    return tuple(total.items())


def _rollout_bytes(plan: Plan, config: Config) -> float:
    """One rollout in the Buffer."""
    size, count = config.rollout.rollout_batch_size or 0, config.rollout.n_samples_per_prompt
    return float(size * count * longest_sample(config, plan.shape) * BYTES_A_SAMPLED_TOKEN)


def _host_bars(plan: Plan, config: Config, groups: list[_Group]) -> tuple[Bar, ...]:
    """The host memory of the GPU node that needs most."""
    per_node, offloads = config.cluster.num_gpus_per_node, plan.trainers_give_memory
    saves = config.checkpoint.async_save and not config.checkpoint.no_save
    bars = []
    for node in range(-(-plan.num_bundles // per_node)):
        ranks = [
            (group, group.stage_of(place)) for group in groups for place in _on_node(group.bundles, node, per_node)
        ]
        served = [b for bundles in plan.all_engine_bundles for b in bundles if b // per_node == node]
        parts = (
            ("reference weights", float(sum(g.num_sets * s.states.weights for g, s in ranks))),
            ("optimizer", float(sum(s.states.host_optimizer for _, s in ranks))),
            ("offloaded trainers", float(sum(s.states.on_device for _, s in ranks)) if offloads else 0.0),
            ("a checkpoint's copy", float(sum(_saved(s) for _, s in ranks)) if saves else 0.0),
            ("rollout", _rollout_bytes(plan, config) if node == 0 else 0.0),
            ("processes", GPU_PROCESS * (len(ranks) + len(served)) + OTHER_PROCESSES),
        )
        bars.append(Bar("host memory", parts))
    return (max(bars, key=lambda bar: bar.total),) if bars else ()


def _saved(stage: StageMemory) -> int:
    return stage.states.weights + stage.states.optimizer + stage.states.host_optimizer
