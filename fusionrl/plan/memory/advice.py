"""The least change of a plan that does not fit by which it does."""

from collections.abc import Callable, Iterator

from fusionrl.config.config import Config
from fusionrl.models.shape import ModelShape
from fusionrl.plan.memory.bars import longest_sample
from fusionrl.plan.memory.report import MemoryReport

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FULL_FLAGS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OFFLOAD_FLAG = "--optimizer-cpu-offload"
UNKNOWN_PROMPT = 1024  # tokens that a proposal leaves for the prompt where --rollout-max-prompt-len is not given
Change = tuple[str, Config]


def least_change(config: Config, shape: ModelShape, try_plan: Callable[[Config], MemoryReport | None]) -> str | None:
    """Flags of the first change that fits with a margin, from the cheapest to the dearest; None: none of them does.

    `config` belongs to the plan that does not fit; `try_plan` estimates another one, None: such a plan cannot be.
    """
    report, prefix = try_plan(config), ""
    while report is not None and report.starved is not None:
        # Nothing that the trainers do helps an engine: these first, one after the other.
        role = report.starved[0]
        for flags, changed in _engines(config, role):  # the smallest that have room
            found = try_plan(changed)
            if found is not None and (found.starved is None or found.starved[0] != role):
                cure, config, report = flags, changed, found
                break
        else:
            break
        if report.fits and not report.is_near:
            return f"{prefix}{cure}{report.size}"
        prefix += f"{cure} "
    for flags, changed in changes(config, shape):
        report = try_plan(changed)
        if report is not None and report.fits and not report.is_near:
            return f"{prefix}{flags}{report.size}"
    return None


def changes(config: Config, shape: ModelShape) -> Iterator[Change]:
    """Changes to try: what costs nothing, then what costs time, then what takes another layout of the same devices."""
    cluster, passed = config.cluster, config.passthrough
    if cluster.colocate and not cluster.offload_rollout:
        yield "--offload-rollout", config.changed(offload_rollout=True)
    if cluster.colocate and cluster.offload_train == "never":
        yield "--offload-train auto", config.changed(offload_train="auto")
    fewer, wider = list(_fewer_tokens(config, shape)), list(_wider(config, shape))
    as_is = [("", config)]
    fully: list[Change] = []  # with all layers recomputed: as they are, with fewer tokens, wider
    if passed.transformer.get("recompute_granularity") != "full":
        fully = [(f"{FULL_FLAGS} {flags}".strip(), _recomputed(c)) for flags, c in [*as_is, *fewer, *wider]]
    yield from fewer
    yield from fully[: 1 + len(fewer)]
    yield from wider
    yield from fully[1 + len(fewer) :]
    if not passed.optimizer.get("optimizer_cpu_offload"):
        for flags, changed in [*as_is, *fully[:1], *wider, *fully[1:]]:
            optimizer = passed.optimizer | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
            yield f"{OFFLOAD_FLAG} {flags}".strip(), changed.changed(optimizer=optimizer)
    if config.model.precision in ("fp32", "auto"):
        changed = config.changed(precision="bf16", rollout_dtype="bf16")
        yield "--precision bf16 --rollout-dtype bf16", changed


def _recomputed(config: Config) -> Config:
    own = {name: value for name, value in config.passthrough.transformer.items() if name != "recompute_modules"}
    return config.changed(transformer=own | FULL)


def _fewer_tokens(config: Config, shape: ModelShape) -> Iterator[Change]:
    """Smaller micro-batches, as long as the longest sample goes into one."""
    model, tokens = config.model, config.train.max_tokens_per_gpu
    longest = longest_sample(config, shape)
    if config.rollout.rollout_max_context_len is None and config.data.rollout_max_prompt_len is None:
        longest = min(longest + UNKNOWN_PROMPT, shape.max_position_embeddings)
    least = max(1, -(-longest // model.context_parallel_size))
    smaller = {tokens * 3 // 4, tokens // 2, tokens // 4, tokens // 8, least}
    for fewer in sorted((fewer for fewer in smaller if least <= fewer < tokens), reverse=True):
        yield f"--max-tokens-per-gpu {fewer}", config.changed(max_tokens_per_gpu=fewer)


def _wider(config: Config, shape: ModelShape) -> Iterator[Change]:
    """More model parallelism on the same devices, within a node for the kinds that talk most."""
    model, cluster = config.model, config.cluster
    devices = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    limits = {
        "expert_model_parallel_size": devices if shape.num_experts else 1,
        "expert_tensor_parallel_size": min(cluster.num_gpus_per_node, devices) if shape.divides_experts else 1,
        "tensor_model_parallel_size": min(cluster.num_gpus_per_node, devices),
        "context_parallel_size": devices,
        "pipeline_model_parallel_size": devices,
    }
    for factor in (2, 4, 8):
        for name, limit in limits.items():
            size = (getattr(model, name) or 1) * factor
            if size <= limit:
                flag = "--" + name.replace("_", "-")
                changed = config.changed(**{name: size})
                if name == "context_parallel_size":  # the same samples, in smaller pieces
                    tokens = config.train.max_tokens_per_gpu // factor
                    changed = changed.changed(max_tokens_per_gpu=tokens)
                    yield f"{flag} {size} --max-tokens-per-gpu {tokens}", changed
                else:
                    yield f"{flag} {size}", changed


# Of a role: the number of its devices, and the devices of one engine.
_SIZES = {
    "engine": ("rollout_num_gpus", "rollout_num_gpus_per_engine"),
    "reward-model": ("rm_num_gpus", "rm_num_gpus_per_engine"),
    "teacher": ("opd_teacher_num_gpus", "opd_teacher_num_gpus_per_engine"),
}


def _engines(config: Config, role: str) -> Iterator[Change]:
    """Engines of more devices each; those that only read get the devices for one."""
    num_field, size_field = _SIZES[role]
    size, count = config.value(size_field), config.value(num_field)
    for larger in (2 * size, 4 * size, 8 * size):
        if larger > config.cluster.num_gpus_per_node:
            return
        values = {size_field: larger}
        if role != "engine" and count % larger:
            values[num_field] = -(-count // larger) * larger
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
        yield flags, config.changed(**values)
