"""Flags that the run's device refuses. Pure, and asked with the device that was found, where --device is auto."""

from collections.abc import Mapping
from typing import Literal

from fusionrl.base.cpu_wing import ATTENTION_BACKEND
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import engine_groups
from fusionrl.config.run_parts import asks_for_routing, uses_engines, uses_trainers
from fusionrl.models.quantization import BlockFp8
from fusionrl.models.shape import ModelShape
from fusionrl.plan.defaults import layer_impl

FP32_ATTENTION = ("torch_native", "triton", "flex_attention")
"""SGLang's attention on GPUs that takes fp32; FlashAttention and its like are compiled for 16 bits and less."""
CPU_DRAFTERS = ("NGRAM",)
"""Values of --sglang-speculative-algorithm with which an engine runs on a CPU (`cpu/speculation.py`)."""
_ATTENTION_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def check_device(
    config: Config,
    shape: ModelShape,
    device: Literal["cpu", "cuda"],
    precision: str,
    rollout_dtype: str,
    quantization: BlockFp8 | None,
) -> None:
    """Refuse, by its flag, what the device cannot do."""
    if device == "cpu" and config.passthrough.optimizer.get("optimizer_cpu_offload"):
        raise ValueError("--optimizer-cpu-offload: there is no GPU memory to save on a CPU; leave the flag out")
    if device == "cpu" and asks_for_routing(config):
        raise ValueError(
            "--use-rollout-routing-replay: SGLang records which experts it chose on a GPU alone; set"
            " rollout_routed_experts in --custom-generate-function-path, or take --use-routing-replay"
        )
    if device == "cuda" and precision == "fp32" and config.model.transformer_impl == "transformer_engine":
        raise ValueError(
            "--transformer-impl transformer_engine with --precision fp32: no attention of Transformer Engine takes"
            " packed sequences in fp32; use --transformer-impl local or auto, or --precision bf16"
        )
    groups = engine_groups(config)
    if asks_for_routing(config) and any(group.role == "prefill" for group in groups):
        raise ValueError(
            "--use-rollout-routing-replay with --engine-group role=prefill: the router, which makes the pairs, drops"
            " the request for the experts; give groups with role=generate, or take --use-routing-replay"
        )
    if device == "cpu" and (parted := next((group for group in groups if group.role in ("prefill", "decode")), None)):
        raise ValueError(
            f"--engine-group {parted.name}: role={parted.role} on a CPU: SGLang moves keys and values between engines"
            " from GPU to GPU alone; give groups with role=generate"
        )
    engine_fields = config.passthrough.sglang
    for name, args in [("", engine_fields), *((group.name, group.server_args) for group in groups)]:
        prefix = f"--engine-group {name}: " if name else "--sglang-"
        if device == "cuda":
            _check_attention(args, prefix, rollout_dtype, config)
        elif uses_engines(config):
            _check_speculation(engine_fields | args, prefix, shape)
    if quantization is not None and uses_engines(config) and (device == "cpu" or rollout_dtype == "fp32"):
        raise ValueError(
            f"--hf-checkpoint {config.model.hf_checkpoint}: its weights are in fp8, with which SGLang computes on a GPU"
            f" alone, and in bf16; this would be on {device} with --rollout-dtype {rollout_dtype}: change these, or"
            " give the bf16 checkpoint"
        )


def check_fused_layers(
    config: Config, shape: ModelShape, device: Literal["cpu", "cuda"], precision: str, version: str | None
) -> None:
    """Refuse attention that Transformer Engine of this `version` (None: not installed) cannot do."""
    impl = layer_impl(config.model.transformer_impl, device, version is not None, precision)
    if device == "cpu" or impl == "local" or version is None:
        return
    major, minor = map(int, version.split(".")[:2])
    for kind in dict.fromkeys(shape.attention):
        if (major, minor) < kind.fused_since:
            raise ValueError(
                f"--transformer-impl {config.model.transformer_impl}: Transformer Engine {version} has no attention of"
                f" the kind {kind.kind} of {shape.model_type}, version {'.'.join(map(str, kind.fused_since))} has;"
                " use --transformer-impl local"
            )


def drafts_by_itself(config: Config) -> bool:
    """Return whether engines speculate with the model's own layers of multi-token prediction."""
    common = config.passthrough.sglang
    settings = [common, *(common | group.server_args for group in engine_groups(config))]
    return any(
        args.get("speculative_algorithm") in ("EAGLE", "NEXTN") and not args.get("speculative_draft_model_path")
        for args in settings
    )


def _check_attention(args: Mapping[str, object], prefix: str, rollout_dtype: str, config: Config) -> None:
    """Refuse attention that engines on a GPU cannot have; `args` are SGLang's fields."""
    if ATTENTION_BACKEND in map(args.get, _ATTENTION_FIELDS):
        raise ValueError(f"{prefix}attention-backend {ATTENTION_BACKEND}: it is for engines on a CPU; leave it out")
    if rollout_dtype != "fp32" or not uses_engines(config):
        return
    for field in _ATTENTION_FIELDS:
        backend = args.get(field)
        if backend is not None and backend not in FP32_ATTENTION:
            raise ValueError(
                f"{prefix}{field.replace('_', '-')} {backend}: the engines are in fp32, which on a GPU only"
                f" {', '.join(FP32_ATTENTION)} take; leave it out, or use --rollout-dtype bf16"
            )


def _check_speculation(args: Mapping[str, object], prefix: str, shape: ModelShape) -> None:
    """Refuse drafts that engines on a CPU cannot have; `args` are all SGLang fields of an engine."""
    drafter = args.get("speculative_algorithm")
    if drafter is None:
        return
    if drafter not in CPU_DRAFTERS:
        raise ValueError(
            f"{prefix}speculative-algorithm {drafter}: SGLang's engines on a CPU lack the kernels of a draft model;"
            f" use {' or '.join(CPU_DRAFTERS)}, or leave it out"
        )
    if reason := next((kind.refuses_drafts for kind in shape.attention if kind.refuses_drafts), ""):
        raise ValueError(f"{prefix}speculative-algorithm {drafter}: on a CPU {reason}; leave it out")
    backends = [str(name) for name in map(args.get, _ATTENTION_FIELDS) if name is not None]
    if set(backends) - {ATTENTION_BACKEND}:
        raise ValueError(
            f"{prefix}speculative-algorithm {drafter} with --sglang-attention-backend {backends[0]}: on a CPU only"
            f" {ATTENTION_BACKEND} attends to drafts; leave the attention backend out"
        )


def check_placement(config: Config, device: Literal["cpu", "cuda"]) -> None:
    """On GPUs, engines that share the trainers' devices get the weights by IPC or files, and others never by IPC.

    Else NCCL would meet itself on a device, or an engine would have no trainer on it.
    """
    cluster, transport = config.cluster, config.weights.update_weight_transport
    if device == "cpu" or not (uses_trainers(config) and uses_engines(config)):
        return
    world_size = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if cluster.colocate and transport == "broadcast":
        raise ValueError(
            "--update-weight-transport broadcast with --colocate: NCCL takes no two ranks on one GPU; use ipc or auto"
        )
    if cluster.colocate and (cluster.rollout_num_gpus or world_size) > world_size:
        raise ValueError(
            f"--rollout-num-gpus {cluster.rollout_num_gpus} with --colocate: only {world_size} devices have a trainer"
            " to share; raise --actor-num-gpus-per-node or leave --colocate out"
        )
    if not cluster.colocate and transport == "ipc":
        raise ValueError(
            "--update-weight-transport ipc: on GPUs an engine maps the memory of the trainer on its own GPU, and these"
            " have none; use broadcast or auto, or --colocate"
        )
