"""What --bitwise cannot do, by flag, reason and cure. On a CPU it promises equality, on GPUs only runs that repeat."""

from collections.abc import Iterator

from fusionrl.config.config import Config
from fusionrl.config.engine_groups import serving_groups
from fusionrl.config.pipeline import pause_mode
from fusionrl.config.run_parts import has_own_rollout
from fusionrl.plan.placement import engine_sizes
from fusionrl.plan.plan import Plan

SHOWN = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types of which engine and trainer were equal in whole runs (`python -m tools.bitwise_loops`)."""

_COLUMNS = 32  # of an MLP: an engine's rank on a CPU has a multiple


def bitwise_errors(config: Config, plan: Plan) -> list[str]:
    """List what --bitwise cannot do in this run; nothing without it."""
    if not config.run.bitwise:
        return []
    if plan.device == "cuda":
        is_fp32 = plan.rollout_dtype == "fp32"
        reason = "SGLang's deterministic inference has no attention in fp32; give bf16"
        return [f"--bitwise with --rollout-dtype fp32: {reason}"] if is_fp32 else []
    return [f"--bitwise with {what}, or leave out --bitwise" for what in _conflicts(config, plan)]


def _conflicts(config: Config, plan: Plan) -> Iterator[str]:
    layout, model_type = plan.layout, plan.shape.model_type
    assert layout is not None, "it acts where weights are pushed"
    if model_type not in SHOWN:
        yield (
            f"a {model_type} model: engine and trainer do not compute it in one order; train one of {', '.join(SHOWN)}"
        )
    if other := sorted({size for size in engine_sizes(config) if size != layout.tp}):
        yield (
            f"--tensor-model-parallel-size {layout.tp} and an engine of {other[0]} devices: they add up other parts;"
            f" give --rollout-num-gpus-per-engine {layout.tp}"
        )
    if layout.tp > 2:
        yield f"--tensor-model-parallel-size {layout.tp}: more than two parts have no one order of adding; give 2 or 1"
    mixture, whole = plan.shape.mixture, _COLUMNS * layout.tp
    for size in (plan.shape.ffn_hidden_size, whole if mixture is None else mixture.ffn_hidden_size):
        if layout.tp > 1 and size % whole:
            yield (
                f"--tensor-model-parallel-size {layout.tp} and an MLP of {size}: engines divide it after they made it a"
                f" multiple of {whole}; give --tensor-model-parallel-size 1 --rollout-num-gpus-per-engine 1"
            )
    if mixture is not None and layout.etp != layout.tp:
        yield (
            f"--expert-tensor-parallel-size {layout.etp} and --tensor-model-parallel-size {layout.tp}: engines divide"
            f" the experts of a mixture as they divide the rest; give --expert-tensor-parallel-size {layout.tp}"
        )
    if layout.cp > 1:
        yield f"--context-parallel-size {layout.cp}: it attends in another order; give 1"
    if plan.precision != plan.rollout_dtype:
        yield f"--precision {plan.precision} and --rollout-dtype {plan.rollout_dtype}: they round differently; give one"
    has_running = has_own_rollout(config) or (plan.knobs is not None and plan.knobs.in_flight != "drain")
    if has_running and pause_mode(config, plan.knobs) == "in_place":  # else no request outlives a push
        flag = "--pause-generation-mode" if plan.knobs is None else "--in-flight"
        yield f"{flag} in_place: after a push, tokens are computed from the cache of older weights; give retract"
    if config.weights.verify_tolerance is not None:
        yield f"--verify-tolerance {config.weights.verify_tolerance:g}: it is 0; leave it out"
    if config.lora.lora_rank:
        yield f"--lora-rank {config.lora.lora_rank}: trainers add an adapter after the product; train all weights"
    if config.data.multimodal_keys:
        yield "--multimodal-keys: the towers of engine and trainer differ; train on text"
    if config.algorithm.use_opd:
        yield "--use-opd: a teacher's log-probs are not computed so; use another loss"
    if config.cluster.rollout_external_engine_addrs:
        yield "--rollout-external-engine-addrs: others start these engines; use the run's own"
    groups = [group.server_args for group in serving_groups(config)]
    for args in (config.passthrough.sglang, *groups):
        for name in ("speculative_algorithm", "quantization", "kv_cache_dtype", "attention_backend"):
            if args.get(name) not in (None, "auto"):
                yield f"--sglang-{name.replace('_', '-')} {args[name]}: trainers compute otherwise; leave it out"
        for name in ("ep_size", "moe_dp_size"):
            if int(args.get(name) or 1) > 1:
                yield f"--sglang-{name.replace('_', '-')} {args[name]}: engines add up experts otherwise; leave it out"
