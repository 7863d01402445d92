"""Bars: the contents of one memory at one moment; phases that alternate have one each.

Those of a GPU, of a node of GPUs, and of a node of CPUs, whose processes share its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fusionrl.config.config import Config
from fusionrl.models.shape import ModelShape
from fusionrl.plan.devices import GIB
from fusionrl.plan.memory.engine import EngineMemory
from fusionrl.plan.memory.states import pinned_bytes
from fusionrl.plan.memory.trainer import StageMemory
from fusionrl.plan.placement import ScorerPlan

if TYPE_CHECKING:
    from fusionrl.plan.plan import Plan

# Of a process on a GPU: CUDA's context, kernels and NCCL's buffers; what the allocator cannot use, of the rest.
CONTEXT_BYTES, FRAGMENTATION = 1.5 * GIB, 0.04
# glibc keeps more of what was freed (docs/results/checks.md).
CPU_FRAGMENTATION = 0.10
# Resident memory of a process with nothing in it, measured on a CPU (docs/results/checks.md).
TRAINER_PROCESS, ENGINE_PROCESS, OTHER_PROCESSES = 0.8 * GIB, 2.0 * GIB, 2.0 * GIB
# On GPU nodes, where CUDA's libraries are loaded; assumed.
GPU_PROCESS = 4.0 * GIB
# Of a rollout in the Buffer: tokens, masks and log-probs as Python numbers.
BYTES_A_SAMPLED_TOKEN = 150


Scorers = Sequence[tuple[ScorerPlan, EngineMemory | None]]
"""The engines that only read, and one device of each; None: not estimated."""


@dataclass(frozen=True)
class Bar:
    """The contents of one memory at one moment: (part, bytes). `fills`: an engine, which takes what is there."""

    name: str
    parts: tuple[tuple[str, float], ...]
    fills: bool = False

    @property
    def total(self) -> float:
        return sum(size for _, size in self.parts)

    def describe(self) -> str:
        """Its total and its parts, those of at least 1 % of it."""
        large = [(part, size) for part, size in self.parts if size >= max(self.total / 100, 1)]
        parts_shown = [f"{part} {gib(size)}" for part, size in large]
        rest = self.total - sum(size for _, size in large)
        if rest >= 0.005 * 2**30:  # what would show as 0.00 is left out
            parts_shown.append(f"other {gib(rest)}")
        return f"{gib(self.total)} GiB = {' + '.join(parts_shown)}"


def gib(size: float) -> str:
    """In GiB, with two digits after the point, or more where these would be 0."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 or not value else f"{value:.4f}"


@dataclass(frozen=True)
class Group:
    """One group of trainers: its stages, and what each rank keeps in host memory: further sets of weights, and bytes of
    adapters that wait for their turn."""

    name: str
    stages: tuple[StageMemory, ...]
    bundles: tuple[int, ...]
    num_sets: int
    waiting: float = 0.0

    def stage_of(self, rank: int) -> StageMemory:
        return self.stages[rank * len(self.stages) // len(self.bundles)]

    def most(self, phase: Literal["training", "scoring"]) -> StageMemory:
        if phase == "training":
            return max(self.stages, key=lambda stage: stage.training)
        return max(self.stages, key=lambda stage: stage.states.on_device + stage.states.weights + stage.scoring)


def bounds_samples(config: Config) -> bool:
    """Return whether no sample is longer than `longest_sample` says: else it counts a prompt as one token."""
    rollout = config.rollout
    is_by_response = config.run.mode != "sft" and rollout.rollout_max_response_len is not None
    has_bound = rollout.rollout_max_context_len is not None or config.data.rollout_max_prompt_len is not None
    return has_bound or not is_by_response


def longest_sample(config: Config, shape: ModelShape) -> int:
    """Tokens of the longest sample that the flags allow."""
    rollout, data = config.rollout, config.data
    cap = config.train.max_tokens_per_gpu * config.model.context_parallel_size
    if rollout.rollout_max_context_len is not None:
        return min(rollout.rollout_max_context_len, shape.max_position_embeddings)
    if config.run.mode == "sft" or rollout.rollout_max_response_len is None:
        return min(cap, shape.max_position_embeddings)
    num_tokens = (data.rollout_max_prompt_len or 1) + rollout.rollout_max_response_len
    return min(num_tokens, shape.max_position_embeddings)


def _states(stage: StageMemory) -> tuple[tuple[str, float], ...]:
    states = stage.states
    return (("weights", states.weights), ("gradients", states.gradients), ("optimizer", states.optimizer))


def _training(stage: StageMemory) -> tuple[tuple[str, float], ...]:
    flying = f" ({stage.in_flight:g} micro-batches in flight)" if stage.in_flight > 1 else ""
    return (
        *_states(stage),
        (f"activations{flying}", stage.activations - stage.images),
        ("images", stage.images),
        (f"{stage.transient_of} for a moment", stage.transient),
    )


def gpu_bars(
    plan: Plan,
    config: Config,
    groups: list[Group],
    engine: EngineMemory | None,
    push: float,
    engine_parts: list[tuple[str, float]],
    scorers: Scorers,
) -> tuple[Bar, ...]:
    """Return the bars of GPUs. `engine_parts`: the trainers' parts while engines generate."""
    cluster, bars = config.cluster, []
    offloads = plan.trainers_give_memory
    shares_engine = plan.is_colocated and engine is not None
    # Where the engines keep their memory, it adds to the trainers'.
    resident: list[tuple[str, float]] = []
    if shares_engine and engine is not None and not cluster.offload_rollout:
        resident.append(("engine", engine.total))
    contexts = ("contexts" if shares_engine else "context", CONTEXT_BYTES * (2 if shares_engine else 1))
    for group in groups:
        neighbours = [
            neighbour for neighbour in groups if neighbour is not group and set(neighbour.bundles) & set(group.bundles)
        ]
        beside = [*resident, contexts]
        if cluster.offload_train == "never":
            beside += [(neighbour.name, neighbour.most("training").states.on_device) for neighbour in neighbours]
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
        # An engine also keeps a reserve for activations and graphs; it is given out, not measured.
        parts = (("weights", engine.weights), ("KV cache", engine.pool), ("images", engine.images))
        bars.append(Bar("generation", (*parts, *engine_parts, contexts), fills=True))
    for scorer, memory in scorers:
        if memory is not None:
            parts = (("weights", memory.weights), ("KV cache", memory.pool))
            bars.append(Bar(scorer.name, (*parts, ("context", CONTEXT_BYTES)), fills=True))
    return tuple(bars)


def _with_margin(name: str, parts: tuple[tuple[str, float], ...], beside: list[tuple[str, float]]) -> Bar:
    margin = FRAGMENTATION * sum(size for _, size in parts)
    return Bar(name, (*parts, ("fragments", margin), *beside))


def _nodes(
    plan: Plan, groups: list[Group], scorers: Scorers, per_node: int
) -> Iterator[tuple[int, list[tuple[Group, StageMemory]], int, list[EngineMemory | None]]]:
    """(number, ranks, devices of the policy's engines, an entry for each device of engines that only read) by node."""
    for node in range(-(-plan.num_bundles // per_node)):
        ranks = [
            (group, group.stage_of(rank))
            for group in groups
            for rank, bundle in enumerate(group.bundles)
            if bundle // per_node == node
        ]
        served = [b for bundles in plan.all_engine_bundles for b in bundles if b // per_node == node]
        readers = [memory for s, memory in scorers for bundles in s.bundles for b in bundles if b // per_node == node]
        yield node, ranks, len(served), readers


def cpu_bars(
    plan: Plan,
    config: Config,
    groups: list[Group],
    engine: EngineMemory | None,
    push: float,
    scorers: Scorers,
) -> tuple[Bar, ...]:
    """Bars of the node that needs most, where all processes share its memory. Nothing is given back between phases but
    what --offload-train writes to files."""
    bars = []
    # On one machine all devices are its own.
    per_node = max(plan.num_bundles, 1) if config.cluster.ray_address is None else config.cluster.num_gpus_per_node
    away = config.cluster.offload_train == "always" and bool(plan.num_engines)
    for node, ranks, num_devices, readers in _nodes(plan, groups, scorers, per_node):
        processes = TRAINER_PROCESS * len(ranks) + ENGINE_PROCESS * (num_devices + len(readers)) + OTHER_PROCESSES
        known = [memory for memory in readers if memory is not None]
        served = [
            ("engines' weights", engine.weights * num_devices if engine else 0.0),
            ("KV caches", (engine.pool * num_devices if engine else 0.0) + sum(memory.pool for memory in known)),
            ("reward model's and teacher's weights", float(sum(memory.weights for memory in known))),
        ]
        sets = [("reference weights", float(sum(g.num_sets * s.states.weights for g, s in ranks)))]
        sets.append(("adapters that wait", sum(g.waiting for g, _ in ranks)))
        fixed = [*served, *sets, ("processes", processes)]
        training = _sum(
            [(*_states(s), ("activations", s.activations), ("backward for a moment", s.transient)) for _, s in ranks]
        )
        training = (*training, ("fragments", CPU_FRAGMENTATION * sum(size for _, size in training)))
        states = _sum([_states(stage) for _, stage in ranks])
        where = f"node {node}, " if plan.num_bundles > per_node else ""
        if ranks:
            bars.append(Bar(f"{where}training", (*training, *fixed)))
        if plan.transport and ranks:
            bars.append(Bar(f"{where}weight push", (*states, ("push", push), *fixed)))
        if num_devices:
            rollout = ("rollout", _rollout_bytes(plan, config))
            bars.append(Bar(f"{where}generation", (*(() if away else states), rollout, *fixed)))
    names = dict.fromkeys(bar.name.split(", ")[-1] for bar in bars)
    return tuple(max((bar for bar in bars if bar.name.endswith(name)), key=lambda bar: bar.total) for name in names)


def _sum(rows: list[tuple[tuple[str, float], ...]]) -> tuple[tuple[str, float], ...]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(dict(row))
    return tuple(total.items())


def _rollout_bytes(plan: Plan, config: Config) -> float:
    size, count = config.rollout.rollout_batch_size or 0, config.rollout.n_samples_per_prompt
    return float(size * count * longest_sample(config, plan.shape) * BYTES_A_SAMPLED_TOKEN)


def gpu_host_bars(
    plan: Plan, config: Config, groups: list[Group], engine: EngineMemory | None, scorers: Scorers
) -> tuple[Bar, ...]:
    """The host memory of the GPU node that needs most."""
    # Weights that adapters are added to are pushed once: engines that give their memory away keep them there.
    kept = engine.weights if engine is not None and plan.engines_give_memory and plan.lora_push == "adapter" else 0.0
    per_node, offloads = config.cluster.num_gpus_per_node, plan.trainers_give_memory
    saves = config.checkpoint.async_save and not config.checkpoint.no_save
    bars = []
    for node, ranks, num_devices, readers in _nodes(plan, groups, scorers, per_node):
        states = [stage.states for _, stage in ranks]
        weights, optimizer = [s.weights for s in states], [s.optimizer for s in states]
        on_host = [s.host_optimizer for s in states]
        parts = (
            ("reference weights", float(sum(g.num_sets * pinned_bytes(s.states.weights) for g, s in ranks))),
            ("adapters that wait", sum(g.waiting for g, _ in ranks)),
            ("optimizer", float(sum(on_host))),
            # The gradients are given away without a copy.
            ("offloaded trainers", sum(map(pinned_bytes, [*weights, *optimizer])) if offloads else 0.0),
            ("engines' weights", kept * num_devices),
            ("a checkpoint's copy", sum([*weights, *optimizer, *on_host]) if saves else 0.0),
            ("rollout", _rollout_bytes(plan, config) if node == 0 else 0.0),
            ("images", config.data.image_cache_mb * 1e6 if node == 0 and plan.shape.vision is not None else 0.0),
            ("processes", GPU_PROCESS * (len(ranks) + num_devices + len(readers)) + OTHER_PROCESSES),
        )
        bars.append(Bar("host memory", parts))
    return (max(bars, key=lambda bar: bar.total),) if bars else ()
