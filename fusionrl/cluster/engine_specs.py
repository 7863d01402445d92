"""The specification of each engine of a run, from Config and Plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fusionrl.cluster.ray_cluster import Bundle
from fusionrl.config.config import Config
from fusionrl.engines.spec import EngineSpec
from fusionrl.plan.pipeline import pause_mode
from fusionrl.plan.plan import Plan

EngineRole = Literal["engine", "reward-model", "teacher"]

_TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_FLAGS = {"engine": "--rollout", "reward-model": "--rm", "teacher": "--opd-teacher"}


def engine_spec(
    config: Config,
    plan: Plan,
    role: EngineRole,
    index: int,
    places: Sequence[Bundle],
    *,
    host: str,
    api_key: str | None,
    log_dir: str,
) -> EngineSpec:
    """The engine number `index` of a role, on the devices `places`.

    Raises:
        ValueError: its devices are on several nodes, or a flag names a field that fusionrl sets itself.
    """
    if len({place.node_id for place in places}) > 1:
        raise ValueError(
            f"{role} {index} would span several nodes ({_FLAGS[role]}-num-gpus-per-engine {len(places)}),"
            " which is not available yet"
        )
    return EngineSpec(
        index=index,
        model_path=_model_path(config, plan, role),
        device=plan.device,
        dtype=_TORCH_DTYPES[plan.rollout_dtype],
        tp_size=len(places),
        gpu_ids=tuple(place.device_id for place in places),
        host=host,
        api_key=api_key,
        log_dir=log_dir,
        seed=config.data.rollout_seed + index,
        start_timeout_s=config.rollout.engine_start_timeout_s,
        num_threads=config.rollout.engine_num_threads,
        server_args=_server_args(config, plan, role),
        role=role,
    )


def expert_parts(config: Config) -> int:
    """Parts into which an engine's ranks divide the experts, in order; 1 where it deals them out in its own way."""
    args = config.passthrough.sglang
    own_way = ("ep_num_redundant_experts", "enable_eplb", "init_expert_location", "moe_dp_size")
    return 1 if any(args.get(name) for name in own_way) else int(args.get("ep_size") or 1)


def _model_path(config: Config, plan: Plan, role: EngineRole) -> str:
    if role == "engine":
        return str(config.model.hf_checkpoint)
    return next(scorer.model_path for scorer in plan.scorers if scorer.role == role)


def _server_args(config: Config, plan: Plan, role: EngineRole) -> dict[str, object]:
    """Fields of SGLang's ServerArgs: the user's own, and for the policy what the run's other flags need."""
    if role == "reward-model":
        return dict(config.reward.rm_server_args)
    if role == "teacher":
        return dict(config.algorithm.opd_teacher_server_args)
    server_args = dict(config.passthrough.sglang)
    if plan.engines_give_memory:
        server_args.setdefault("enable_memory_saver", True)
    if pause_mode(config, plan) == "in_place":
        # SGLang drops its prefix cache only where no request runs; kept, it would answer from the weights before.
        server_args.setdefault("disable_radix_cache", True)
    if config.algorithm.use_rollout_routing_replay and plan.device == "cuda":
        server_args.setdefault("enable_return_routed_experts", True)
    if config.rollout.stream_responses:  # else each event repeats all tokens so far
        server_args.setdefault("incremental_streaming_output", True)
    return server_args
