"""The memory that a plan takes on each device and node, as bars; alternating phases are shown side by side.

A bar is the content of one memory at one moment. The largest bar is compared with the device's memory (on a CPU: all
processes of a node with the node's). Nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fusionrl.config.config import Config
from fusionrl.config.pipeline import pause_mode
from fusionrl.config.run_parts import needs_reference
from fusionrl.models.families import model_rules
from fusionrl.models.shape import ModelShape
from fusionrl.models.trainable import AdapterSpec
from fusionrl.plan.balance import BatchPlan
from fusionrl.plan.devices import Machine
from fusionrl.plan.layout import TrainerLayout, stage_layers
from fusionrl.plan.memory.activations import Recompute, TrainingOptions
from fusionrl.plan.memory.bars import (
    Bar,
    Group,
    Scorers,
    bounds_samples,
    cpu_bars,
    gib,
    gpu_bars,
    gpu_host_bars,
    longest_sample,
)
from fusionrl.plan.memory.engine import EngineMemory, engine_memory, scorer_memory
from fusionrl.plan.memory.states import Bytes, StateOptions, served_bytes, stage_parameters, state_bytes
from fusionrl.plan.memory.trainer import StageMemory, even_stages, trainer_memory
from fusionrl.plan.placement import ScorerRole
from fusionrl.plan.push_plan import BUFFERS, planned_push
from fusionrl.plan.trained_parts import adapter_folders, adapter_slots, adapters_of, frozen_of
from fusionrl.plan.trainer_plan import WIDTHS, auxiliary_config, layer_impl

if TYPE_CHECKING:
    from fusionrl.plan.plan import Plan

LOCAL_PADDING = 1.25  # places of the local attention's padded calls, for each token of unlike sequences
NEAR = 0.95  # of a memory: an estimate this close may be wrong either way


@dataclass(frozen=True)
class MemoryReport:
    """The estimate of a plan."""

    device_bars: tuple[Bar, ...]  # of one device of the worst stage, a bar a phase; empty on a CPU
    host_bars: tuple[Bar, ...]  # of one node
    engine: EngineMemory | None  # of one device of an engine; None: no engines, or a device whose memory is not known
    machine: Machine | None  # what they are compared with; None: nothing
    longest: int  # tokens of the longest sample
    push: float  # bytes that a weight push takes on a rank
    scorers: Scorers = ()  # of the engines that only read
    change: str | None = None  # the least change found by which it fits; None: it fits, or none was found or looked for

    @property
    def worst(self) -> Bar | None:
        """The largest bar of what is compared; that of an engine, which takes what is there, only where it is alone."""
        bars = self.device_bars or self.host_bars
        bars = tuple(bar for bar in bars if not bar.fills) or bars
        return max(bars, key=lambda bar: bar.total, default=None)

    @property
    def _limit(self) -> float | None:
        """Bytes that `worst` is compared with."""
        if self.machine is None:
            return None
        return self.machine.device_memory if self.device_bars else self.machine.host_memory

    @property
    def starved(self) -> tuple[Literal["engine"] | ScorerRole, str] | None:
        """Return the first engine without room for the longest sample although the devices have: whose, and why."""
        engines: list[tuple[Literal["engine"] | ScorerRole, str, EngineMemory | None]] = [
            ("engine", "engine", self.engine),
            *((scorer.role, f"{scorer.name}'s engine", memory) for scorer, memory in self.scorers),
        ]
        for role, name, engine in engines:
            if engine is None or engine.fraction is None:
                continue
            if engine.num_states and not engine.num_requests:
                return role, (
                    f"the {name} has room for {engine.num_states} states of {gib(engine.state_bytes)} GiB, and one"
                    f" request takes more: weights take {gib(engine.weights)} GiB of {engine.fraction:.2f} of the GPU"
                )
            if engine.kv_tokens < self.longest:
                return role, (
                    f"the {name}'s KV cache has room for {max(engine.kv_tokens, 0)} tokens, and a sample may have"
                    f" {self.longest}: weights take {gib(engine.weights)} GiB of {engine.fraction:.2f} of the device"
                )
        return None

    @property
    def _excess(self) -> str | None:
        """Return what does not fit, in words."""
        worst, limit, host_limit = self.worst, self._limit, self.machine.host_memory if self.machine else None
        if self.starved is not None:
            return self.starved[1]
        if worst is not None and limit is not None and worst.total > limit:
            return self._usage(worst, limit)
        over = next((bar for bar in self.host_bars if host_limit is not None and bar.total > host_limit), None)
        if over is None or host_limit is None:
            return None
        return f"{gib(over.total)} of {gib(host_limit)} GiB of a node's host memory ({over.name})"

    def _usage(self, worst: Bar, limit: float) -> str:
        kind = self.machine.kind if self.machine is not None else ""
        return f"{gib(worst.total)} of {gib(limit)} GiB ({kind}; worst: {worst.name})"

    @property
    def size(self) -> str:
        """The size of the worst bar, after the flags of a proposal."""
        return f" ({gib(self.worst.total)} GiB)" if self.worst is not None else ""

    @property
    def fits(self) -> bool | None:
        """None: there is nothing to compare with."""
        if self._excess is not None:
            return False
        return None if self.worst is None or self._limit is None else True

    @property
    def is_near(self) -> bool:
        """Return whether the estimate is so close to the memory that it may be wrong either way."""
        return self.worst is not None and self._limit is not None and self.worst.total > NEAR * self._limit

    def verdict(self) -> str:
        """One line: whether it fits, the worst moment, and the least change that fits."""
        worst, limit = self.worst, self._limit
        if worst is None or limit is None:
            return "not compared: the memory of the devices is not known"
        if (excess := self._excess) is not None:
            cure = f"it would with {self.change}" if self.change else "no change that was tried fits: take more devices"
            return f"DOES NOT FIT: {excess}; {cure}"
        return f"fits: {self._usage(worst, limit)}{', close enough that it may not' if self.is_near else ''}"

    def lines(self) -> list[str]:
        """The bars, for plan.txt."""
        lines = [f"a device, {bar.name}: {bar.describe()}" for bar in self.device_bars]
        lines += [f"a node, {bar.name}: {bar.describe()}" for bar in self.host_bars]
        named = [("an engine", self.engine), *((f"an engine of the {s.name}", memory) for s, memory in self.scorers)]
        lines += [f"a device of {name}: {_described(engine)}" for name, engine in named if engine is not None]
        lines += [f"the {s.name}: not estimated ({s.unknown})" for s, _ in self.scorers if s.unknown]
        return lines


def _described(engine: EngineMemory) -> str:
    cache = (
        f"weights {gib(engine.weights)} + KV cache {gib(engine.pool - engine.states)} GiB ="
        f" {max(engine.kv_tokens, 0)} tokens an engine ({engine.kv_bytes / 1024:.1f} KiB each)"
    )
    if not engine.num_states:
        return cache
    return (
        f"{cache} + states {gib(engine.states)} GiB = {engine.num_states} of {engine.state_bytes / 2**20:.1f} MiB,"
        f" for {engine.num_requests} requests at a time"
    )


def memory_report(plan: Plan, config: Config, machine: Machine | None, push: float | None = None) -> MemoryReport:
    """The estimate of `plan`, whose own `memory` is not read.

    push  bytes of a weight push, where they are known; to work them out takes seconds for a large model
    """
    groups = _groups(plan, config, machine is None or machine.has_fused_layers)
    engine_parts = _beside_engines(plan, config, groups)
    engine = _engine(plan, config, machine, engine_parts)
    if push is None:
        push = _push_bytes(plan, config) if plan.transport else 0.0
    longest = longest_sample(config, plan.shape)
    on_cpu = plan.device == "cpu"
    scorers = tuple((s, scorer_memory(s, plan.rollout_dtype, machine, on_cpu=on_cpu)) for s in plan.scorers)
    if on_cpu:
        bars = cpu_bars(plan, config, groups, engine, push, scorers)
        return MemoryReport((), bars, engine, machine, longest, push, scorers)
    of_devices = gpu_bars(plan, config, groups, engine, push, engine_parts, scorers)
    of_hosts = gpu_host_bars(plan, config, groups, engine, scorers)
    return MemoryReport(of_devices, of_hosts, engine, machine, longest, push, scorers)


def _groups(plan: Plan, config: Config, has_fused_layers: bool) -> list[Group]:
    if plan.layout is None:
        return []
    a, is_rl = config.algorithm, config.run.mode == "rl"
    # Without its adapters the policy is the reference.
    uses_reference = needs_reference(a) and not config.lora.lora_rank
    num_sets = int(is_rl and uses_reference) + int(is_rl and a.use_opd and a.opd_type == "megatron")
    stages = _stages(plan, config, plan.shape, plan.layout, plan.batch, has_fused_layers)
    waiting, spec = 0.0, adapters_of(config, plan.shape)
    if spec is not None and (count := len(adapter_folders(config))) > 1:  # copies that take turns in the model
        states = training_bytes(plan, config, spec)
        waiting = float(count * (states.weights + states.optimizer))
    groups = [Group("trainers", stages, plan.trainer_bundles, num_sets, waiting)]
    auxiliary = plan.auxiliary
    if auxiliary is not None:
        role_config = auxiliary_config(config, auxiliary.role)
        sizes = auxiliary.shape, auxiliary.layout, auxiliary.batch
        memories = _stages(plan, role_config, *sizes, has_fused_layers)
        groups.append(Group(auxiliary.role, memories, auxiliary.bundles, int(auxiliary.role == "prm")))
    return groups


def _stages(
    plan: Plan,
    config: Config,
    shape: ModelShape,
    layout: TrainerLayout,
    batch: BatchPlan | None,
    has_fused_layers: bool,
) -> tuple[StageMemory, ...]:
    passed, on_cpu = config.passthrough, plan.device == "cpu"
    impl = layer_impl(config.model.transformer_impl, plan.device, has_fused_layers, plan.precision)
    num_samples, tokens = layout.pp, config.train.max_tokens_per_gpu
    if batch is not None:
        num_samples = -(-batch.global_batch_size // layout.dp)
        # A step of few short samples never fills its micro-batches.
        tokens = min(tokens, -(-num_samples * longest_sample(config, shape) // layout.cp))
    packs = config.train.micro_batch_size != 1
    is_rl, algorithm, train = config.run.mode == "rl", config.algorithm, config.train
    options = TrainingOptions(
        impl=impl,
        precision=plan.precision,
        on_cpu=on_cpu,
        longest=min(longest_sample(config, shape), config.train.max_tokens_per_gpu * layout.cp),
        cells=LOCAL_PADDING if packs else 1.0,
        is_padded=packs,
        recompute=Recompute.of(passed.transformer),
        sequence_parallel=passed.transformer.get("sequence_parallel", True) is not False,
        imbalance=config.planning.router_imbalance,
        own_attention=on_cpu and bounds_samples(config) and not passed.transformer.get("attention_dropout"),
        adapters=adapters_of(config, shape),
        tokens=tokens,
        num_micro_batches=max(num_samples, 1),  # at most: each has a sample
        chunk_size=train.log_probs_chunk_size,
        entropy_grad=is_rl and algorithm.entropy_coef > 0,
        whole_logits=is_rl and algorithm.loss_type == "custom_loss",
        max_patches=train.max_patches_per_gpu,
        recomputes_vision=train.vision_recompute,
    )
    states = StateOptions.of(plan.precision, passed.optimizer, passed.ddp)
    return trainer_memory(shape, layout, options, states, passed.transformer, frozen_of(config, shape))


def _beside_engines(plan: Plan, config: Config, groups: list[Group]) -> list[tuple[str, float]]:
    """Return the part of the trainers that stays on the engines' devices while these generate."""
    used = {bundle for bundles in plan.engine_bundles for bundle in bundles}
    if plan.device == "cpu" or plan.trainers_give_memory:
        return []
    return [
        (group.name, float(max(stage.states.on_device for stage in group.stages)))
        for group in groups
        if used & set(group.bundles)
    ]


def _engine(
    plan: Plan, config: Config, machine: Machine | None, engine_parts: list[tuple[str, float]]
) -> EngineMemory | None:
    if not plan.num_engines:
        return None
    width = WIDTHS[plan.rollout_dtype]
    weights = float(plan.push_bytes if plan.quantization else plan.pushed_shape.num_parameters * width)
    if plan.lora_push == "adapter" and (spec := adapters_of(config, plan.shape)) is not None:
        slots = adapter_slots(config, plan.knobs)
        weights += slots * plan.engine_size * served_bytes(plan.shape, spec, plan.engine_size, width)
    # SGLang's fields of the engine that has most of the weights on each of its devices.
    sizes = [len(bundles) for bundles in plan.engine_bundles]
    group = plan.group_of(sizes.index(min(sizes)))
    args = config.passthrough.sglang | (group.server_args if group is not None else {})
    if pause_mode(config, plan.knobs) == "in_place":
        args["disable_radix_cache"] = True
    return engine_memory(
        plan.shape,
        weights,
        plan.engine_size,
        plan.rollout_dtype,
        args,
        device_memory=machine.device_memory if machine is not None else None,
        on_cpu=plan.device == "cpu",
        resident=sum(size for _, size in engine_parts),
    )


def training_bytes(plan: Plan, config: Config, spec: AdapterSpec | None) -> Bytes:
    """Return the states, of what is trained, of the rank that has most of them, the optimizer's wherever they are.

    spec  adapters that are trained; None: all weights are
    """
    assert plan.layout is not None, "the run has trainers"
    shape, layout, passed = plan.shape, plan.layout, config.passthrough
    stages = stage_layers(layout, shape.num_layers, passed.transformer) or even_stages(layout, shape.num_layers)
    frozen = frozenset[str]() if spec is None else frozen_of(config, shape)
    options = replace(StateOptions.of(plan.precision, passed.optimizer, passed.ddp), host_share=0.0)
    counted = stage_parameters(shape, layout, stages, frozen, spec)
    trained = (replace(parameters, frozen=(), frozen_exact=()) for parameters in counted)
    return max((state_bytes(each, layout, options) for each in trained), key=lambda states: states.optimizer)


def _push_bytes(plan: Plan, config: Config) -> float:
    """Return a weight push's memory without the weights, on the rank that needs most."""
    push = planned_push(plan, config)
    if push is None:
        largest = max(rule.whole.numel for rule in model_rules(plan.shape).values()) * WIDTHS[plan.rollout_dtype]
        return float(BUFFERS * max(config.weights.update_weight_buffer_size, largest) + largest)
    return float(max(push.peak_bytes(rank) for rank in push.sources))
