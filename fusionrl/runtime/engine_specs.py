"""The specification of each engine of a run, from Config and Plan."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from fusionrl.checks.images import check_settings, image_settings
from fusionrl.config.config import Config
from fusionrl.config.pipeline import pause_mode
from fusionrl.config.run import PROFILES, ProfileOrder, nsys_command
from fusionrl.config.run_parts import uses_trainers
from fusionrl.engines.spec import EngineSpec
from fusionrl.models.engine_config import pushed_arguments
from fusionrl.plan.plan import Plan
from fusionrl.plan.trained_parts import adapter_folders, adapter_slots, adapters_of, target_modules
from fusionrl.runtime.ray_cluster import Bundle

logger = logging.getLogger(__name__)

EngineRole = Literal["engine", "reward-model", "teacher"]

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_FLAGS = {"engine": "--rollout", "reward-model": "--rm", "teacher": "--opd-teacher"}


def engine_specs(
    config: Config,
    plan: Plan,
    role: EngineRole,
    index: int,
    places: Sequence[Bundle],
    *,
    host_of: Callable[[Bundle], str],
    api_key: str | None,
    log_dir: str,
) -> list[EngineSpec]:
    """The engine number `index` of a role, on the devices `places`: its parts, one for each node that it spans. Raises
    ValueError if the nodes have different numbers of its devices, or a flag switches off what the run needs."""
    parts = by_node(places)
    if len({len(part) for part in parts}) > 1:
        counts = ", ".join(str(len(part)) for part in parts)
        raise ValueError(
            f"{_FLAGS[role]}-num-gpus-per-engine {len(places)}: {role} {index} has {counts} devices on its nodes, and"
            " SGLang wants as many on each; take a size that divides a node's devices, or a multiple of them, and as"
            " many trainers that engines begin where a node does"
        )
    if len(parts) > 1:
        logger.info("%s %d spans %d nodes, %d devices on each", role, index, len(parts), len(parts[0]))
    return [
        EngineSpec(
            index=index,
            model_path=_model_path(config, plan, role),
            device=plan.device,
            dtype=TORCH_DTYPES[plan.rollout_dtype],
            tp_size=len(places),
            gpu_ids=tuple(place.gpu.ordinal for place in part),
            host=host_of(part[0]),
            api_key=api_key,
            log_dir=log_dir,
            seed=config.data.rollout_seed + index,
            start_timeout_s=config.rollout.engine_start_timeout_s,
            num_threads=1 if config.run.bitwise else config.rollout.engine_num_threads,
            server_args=_server_args(config, plan, role, index),
            images=image_settings(config, plan.shape) if role == "engine" else None,
            adapters=tuple(adapter_folders(config)) if role == "engine" and plan.lora_push == "adapter" else (),
            role=role,
            wrapper=_wrapper(config, role, index, Path(log_dir).parent),
            bitwise=config.run.bitwise and role == "engine",
            num_nodes=len(parts),
            node_rank=rank,
        )
        for rank, part in enumerate(parts)
    ]


def by_node(places: Sequence[Bundle]) -> list[list[Bundle]]:
    """Return the devices of an engine, those of each node together, in the order of its ranks."""
    parts: dict[str, list[Bundle]] = {}
    for place in places:
        parts.setdefault(place.node_id, []).append(place)
    return list(parts.values())


def _wrapper(config: Config, role: EngineRole, index: int, run_dir: Path) -> tuple[str, ...]:
    order = ProfileOrder.of(config)
    if order is None or order.tool != "nsys" or role != "engine" or not order.wants_engine(index):
        return ()
    return tuple(nsys_command(str(run_dir.absolute() / PROFILES / f"engine-{index}.%n")))


def expert_parts(config: Config, plan: Plan, index: int) -> int:
    """Parts into which an engine's ranks divide the experts, in order; 1 where it deals them out in its own way."""
    group = plan.group_of(index)
    args = config.passthrough.sglang | (group.server_args if group is not None else {})
    own_way = ("ep_num_redundant_experts", "enable_eplb", "init_expert_location", "moe_dp_size")
    return 1 if any(args.get(name) for name in own_way) else int(args.get("ep_size") or 1)


def _model_path(config: Config, plan: Plan, role: EngineRole) -> str:
    if role == "engine":
        return str(config.model.hf_checkpoint)
    return next(scorer.model_path for scorer in plan.scorers if scorer.role == role)


def _server_args(config: Config, plan: Plan, role: EngineRole, index: int) -> dict[str, object]:
    if role == "reward-model":
        return dict(config.reward.rm_server_args)
    if role == "teacher":
        return dict(config.algorithm.opd_teacher_server_args)
    return policy_server_args(config, plan, index)


# Switches that the run sets on its engines, and what goes wrong without.
_NOT_OFF = {
    "disable_radix_cache": "a pause in place needs it, or answers come from the weights before the push",
    "incremental_streaming_output": "--stream-responses reads in each event the new tokens alone",
}
_LORA = ("lora_paths", "max_loaded_loras")  # further arguments of SGLang about adapters that pushes load
# SGLang's runners of gpt-oss's experts that record no choice of experts; without the flag SGLang takes one of these.
_SILENT = ("auto", "triton_kernel", "flashinfer_mxfp4")


def policy_server_args(config: Config, plan: Plan, index: int) -> dict[str, object]:
    """Return the ServerArgs fields of a policy engine: the user's, and those that the run's other flags need."""
    group = plan.group_of(index)
    server_args = config.passthrough.sglang | (group.server_args if group is not None else {})
    prefix = f"--engine-group {group.name}: " if group is not None else "--sglang-"
    if group is not None and group.role in ("prefill", "decode"):
        server_args["disaggregation_mode"] = group.role
    if (images := image_settings(config, plan.shape)) is not None:
        check_settings(images, plan.device, server_args, prefix)
    if plan.engines_give_memory:
        server_args.setdefault("enable_memory_saver", True)
    if plan.lora_push == "adapter":
        adapter_args = _adapter_args(config, plan)
        if wrong := next((name for name in server_args if name in adapter_args or name in _LORA), None):
            raise ValueError(
                f"{prefix}{wrong.replace('_', '-')}: --lora-rank, --target-modules and --max-staleness say which"
                " adapters engines have; leave it out"
            )
        if plan.device == "cpu":
            server_args.setdefault("lora_backend", "torch_native")
        if plan.engines_give_memory:  # else the weights would have to be pushed again each time
            server_args.setdefault("enable_weights_cpu_backup", True)
        server_args |= adapter_args
    if config.run.bitwise and plan.device == "cuda":
        server_args.setdefault("enable_deterministic_inference", True)
    if config.algorithm.use_rollout_routing_replay and plan.device == "cuda":
        server_args.setdefault("enable_return_routed_experts", True)
        is_stacked = any(mlp.has_whole_experts for mlp in plan.shape.mlp)  # gpt-oss
        if is_stacked and server_args.setdefault("moe_runner_backend", "triton") in _SILENT:
            raise ValueError(
                f"{prefix}moe-runner-backend={server_args['moe_runner_backend']}: its kernel records no experts, which"
                " --use-rollout-routing-replay asks engines for; leave it out"
            )
    if uses_trainers(config) and config.model.hf_checkpoint is not None:
        pushed = pushed_arguments(config.model.hf_checkpoint, server_args.get("json_model_override_args"))
        if pushed and (load_format := server_args.get("load_format", "dummy")) != "dummy":
            raise ValueError(
                f"{prefix}load-format={load_format}: --hf-checkpoint is in MXFP4, whose weights engines get from"
                " trainers in another form; leave it out"
            )
        server_args |= pushed
    needed = {
        # SGLang drops its prefix cache only where no request runs; kept, it would answer from the weights before.
        # A version of an adapter has a prefix cache of its own.
        "disable_radix_cache": pause_mode(config, plan.knobs) == "in_place" and plan.lora_push != "adapter",
        "incremental_streaming_output": config.rollout.stream_responses,  # else each event repeats all tokens so far
    }
    for name in [name for name, is_needed in needed.items() if is_needed]:
        if not server_args.setdefault(name, True):
            raise ValueError(f"{prefix}{name.replace('_', '-')}=false: {_NOT_OFF[name]}; leave it out")
    return server_args


def _adapter_args(config: Config, plan: Plan) -> dict[str, object]:
    """Return the ServerArgs fields of an engine that gets adapters by themselves."""
    spec = adapters_of(config, plan.shape)
    assert spec is not None, "the run has adapters"
    return {
        "enable_lora": True,
        "max_lora_rank": spec.rank,
        "lora_target_modules": sorted(target_modules(plan.shape, spec)),
        "max_loras_per_batch": adapter_slots(config, plan.knobs),
    }
