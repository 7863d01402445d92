"""Values that the trainer derives from the configuration and its plan: device, layers, Megatron's, aggregation."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fusionrl.config.config import Config
from fusionrl.models.shape import ModelShape
from fusionrl.plan.trainer_plan import Impl, TrainerPlan, layer_impl

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


_MAY_CHANGE = frozenset(("moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_router_dtype"))
"""Fields of the kinds of layers that users may set: how a mixture is trained, not what it computes."""


def rank_device(plan: TrainerPlan, rank: int, ordinal: int | None = None) -> torch.device:
    """Return the device of a rank: the GPU that this process numbers `ordinal`; without one, ranks go round them all.

    Raises ValueError if the plan says "cuda" where there is none, or not as many, or "cpu" where Megatron would use
    CUDA anyway.
    """
    has_cuda = torch.cuda.is_available()
    if plan.device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu or auto")
    if plan.device == "cpu" and has_cuda:
        raise ValueError("--device cpu: a CUDA device is visible; hide it (CUDA_VISIBLE_DEVICES=) or use --device auto")
    if not has_cuda:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if ordinal is not None and ordinal >= count:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all of them")
        raise ValueError(f"rank {rank}: placed on GPU {ordinal} of its node, where torch sees {count} ({seen})")
    return torch.device("cuda", rank % count if ordinal is None else ordinal)


def start_bitwise(device: torch.device) -> None:
    """Switch this process over to --bitwise. Raises RuntimeError if a CPU's products are not exact."""
    if device.type == "cpu":
        from fusionrl.cpu import bitwise

        bitwise.start()
    else:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time, and changes no result


def installed_impl(config: Config, device: str, precision: str) -> Impl:
    """Return whose layers a rank has: for `auto`, Transformer Engine's on a GPU where its node has the package.

    Raises ValueError if Transformer Engine is asked for where it is not installed or has no device.
    """
    impl = config.model.transformer_impl
    available = device == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if impl == "transformer_engine" and not available:
        raise ValueError(
            "--transformer-impl transformer_engine: it needs a CUDA device and the package "
            "transformer_engine; use --transformer-impl local or auto"
        )
    return layer_impl(impl, device, available, precision)


def transformer_fields(config: Config, shape: ModelShape, plan: TrainerPlan) -> dict[str, object]:
    """Return the fields of TransformerConfig.

    Raises ValueError for a passed-through field that the model has otherwise, or that a CPU run would be wrong with.
    """
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    from fusionrl.trainer.local_layers import ACTIVATIONS

    layout, impl = plan.layout, installed_impl(config, plan.device, plan.precision)
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    fields: dict[str, object] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.rms_norm_eps,
        # Megatron sums the gradients of norms of q and k over tensor-parallel ranks, which each hold a part of a norm
        # over all heads.
        "qk_layernorm": shape.qk_layernorm and not shape.width_norm,
        "add_qkv_bias": shape.attention_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": shape.zero_centered_norms,
        "gated_linear_unit": True,
        "activation_func": quick_gelu if shape.activation == "quick_gelu" else ACTIVATIONS[shape.activation][0],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        # Interleaved stages exchange with both neighbours at once: one after the other, messages cross.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "sequence_parallel": layout.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # Every weight is read from the checkpoint; drawing random ones first would only cost time. Not by
        # `perform_initialization=False`: on a CPU that also leaves out the marks by which the gradient norm
        # knows which parameters are split over tensor-parallel ranks.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "variable_seq_lengths": True,
        # Refused as "allgather" with variable lengths, even by a model without experts.
        "moe_token_dispatcher_type": "alltoall",
        # Makes data-parallel gradients sums, not means; see steps.py.
        "calculate_per_token_loss": True,
        # On a CPU by `cpu.megatron_patches`; on a GPU it needs apex, or Transformer Engine's layers. Autograd sees no
        # such gradient: a user's model may have hooks on a weight, or use it twice.
        "gradient_accumulation_fusion": plan.device == "cpu"
        and not (config.model.custom_model_provider_path or config.model.custom_spec_path),
        "masked_softmax_fusion": False,
        "deterministic_mode": config.run.bitwise and plan.device == "cuda",
        "rotary_interleaved": shape.rotary_interleaved,
        "transformer_impl": impl,
    }
    fields |= shape.kind_fields
    if shape.mtp_layers:
        fields["mtp_num_layers"] = shape.mtp_layers
    if shape.num_experts:
        fields["moe_grouped_gemm"] = impl == "transformer_engine"
    return _with_passed(fields, config.passthrough.transformer, shape, plan)


def _with_passed(
    fields: dict[str, object], passed: Mapping[str, object], shape: ModelShape, plan: TrainerPlan
) -> dict[str, object]:
    """Return the fields with those that a CPU needs, and the user's."""
    for name in sorted(passed.keys() & shape.kind_fields.keys() - _MAY_CHANGE):
        raise ValueError(
            f"--{name.replace('_', '-')} {passed[name]}: the config.json of --hf-checkpoint says"
            f" {shape.kind_fields[name]}, and so engines compute; leave the flag out"
        )
    if plan.device == "cpu":
        from fusionrl.cpu.megatron_patches import OVERRIDES

        for name, (value, reason) in OVERRIDES.items():
            if passed.get(name, value) != value:
                flag = f"--{name.replace('_', '-')} {passed[name]}"
                raise ValueError(f"{flag}: on a CPU it must be {value}, for {reason}; leave the flag out")
            fields[name] = value
    return fields | dict(passed)


def transformer_class(fields: Mapping[str, object]) -> type[TransformerConfig]:
    """Return Megatron's class that has these fields."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    return MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def optimizer_fields(config: Config, plan: TrainerPlan) -> dict[str, object]:
    """Return the fields of OptimizerConfig."""
    train = config.train
    bf16 = plan.precision == "bf16"
    fields = {
        "optimizer": "adam",
        "lr": train.lr,
        "min_lr": min(train.min_lr, train.lr),
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_eps": train.adam_eps,
        "clip_grad": train.clip_grad,
        "use_distributed_optimizer": True,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
    }
    return fields | config.passthrough.optimizer


def ddp_fields(config: Config) -> dict[str, object]:
    """Return the fields of DistributedDataParallelConfig."""
    fields: dict[str, object] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        # A gradient that is not finite skips the step and is counted; it does not end the run.
        "check_for_nan_in_grad": False,
        "average_in_collective": False,
    }
    return fields | config.passthrough.ddp


def aggregation_of(config: Config) -> str:
    """Return the aggregation of the tokens' losses: a `kind` of `policy_losses.token_weights`."""
    if config.run.mode == "rl" and config.algorithm.policy_loss == "dpo":
        return "constant"
    if config.run.mode == "rl" and config.algorithm.loss_aggregation != "auto":
        return config.algorithm.loss_aggregation
    return "token_mean" if config.algorithm.calculate_per_token_loss else "sequence_mean"


def loss_length(config: Config) -> float | None:
    """Return the divisor of the aggregation `constant`."""
    if config.algorithm.policy_loss == "dpo":
        return 1.0
    return config.algorithm.loss_length or config.rollout.rollout_max_response_len
