"""Values that the trainer derives from the configuration and its plan: device, layers, Megatron's, aggregation."""

import importlib.util
import os

import torch

from fusionrl.config.config import Config
from fusionrl.models.shape import ModelShape
from fusionrl.models.yarn import Yarn, is_yarn
from fusionrl.plan.defaults import Impl, layer_impl
from fusionrl.plan.trainer_plan import TrainerPlan


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


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Round the vocabulary up to a multiple of the tensor parallel size; rows beyond `vocab_size` are padding."""
    return -(-vocab_size // tp) * tp


def _is_users(config: Config) -> bool:
    """Return whether a user function builds the model or its layers."""
    return bool(config.model.custom_model_provider_path or config.model.custom_spec_path)


def transformer_fields(config: Config, shape: ModelShape, plan: TrainerPlan) -> dict[str, object]:
    """Return the fields of TransformerConfig.

    Raises ValueError for a passed-through field that a CPU run would be wrong with.
    """
    import torch.nn.functional as F

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
        "qk_layernorm": shape.qk_layernorm,
        "add_qkv_bias": shape.attention_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
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
        # Makes data-parallel gradients sums, not means; see step.py.
        "calculate_per_token_loss": True,
        # On a CPU by `cpu.gradients`; on a GPU it needs apex, or Transformer Engine's layers. Autograd sees no
        # such gradient: a user's model may have hooks on a weight, or use it twice.
        "gradient_accumulation_fusion": plan.device == "cpu" and not _is_users(config),
        "masked_softmax_fusion": False,
        "rotary_interleaved": shape.rotary_interleaved,
        "transformer_impl": impl,
    }
    fields |= _expert_fields(shape, impl) | _latent_fields(shape) | _yarn_fields(shape)
    passed = config.passthrough.transformer
    if plan.device == "cpu":
        from fusionrl.cpu import megatron_patches

        fields.update({name: value for name, (value, _) in megatron_patches.OVERRIDES.items()})
        for name, (value, reason) in megatron_patches.OVERRIDES.items():
            if name in passed and passed[name] != value:
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{flag} {passed[name]}: on a CPU it must be {value}, for {reason}; leave the flag out"
                )
    fields.update(passed)
    return fields


def _expert_fields(shape: ModelShape, impl: str) -> dict[str, object]:
    moe = shape.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(layer in moe.layers) for layer in range(shape.num_layers)],
        "moe_router_topk": moe.topk,
        "moe_router_score_function": moe.score_function,
        # Softmax over all experts, or over the chosen ones: the latter makes their weights sum to 1.
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": moe.scaling_factor if moe.scaling_factor != 1.0 else None,
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.group_topk if moe.num_groups > 1 else None,
        "moe_router_enable_expert_bias": moe.expert_bias,
        # The engines must choose the same experts: nothing moves the bias unless the user says so.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_grouped_gemm": impl == "transformer_engine",
    }


def _latent_fields(shape: ModelShape) -> dict[str, object]:
    mla = shape.mla
    if mla is None:
        return {}
    fields: dict[str, object] = mla.model_dump() | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": shape.rope_theta,
    }
    scaling = shape.rope_scaling
    if scaling is not None and is_yarn(scaling):
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling["factor"],
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "beta_fast": scaling.get("beta_fast", 32),
            "beta_slow": scaling.get("beta_slow", 1),
            "mscale": scaling.get("mscale", 1.0),
            "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
        }
    return fields


def _yarn_fields(shape: ModelShape) -> dict[str, object]:
    """With YaRN queries and keys are longer; all of each is rotated, so scores grow by the square."""
    if shape.mla is not None or shape.rope_scaling is None or not is_yarn(shape.rope_scaling):
        return {}
    yarn = Yarn.of(shape.rope_scaling, shape.max_position_embeddings)
    return {"softmax_scale": yarn.attention_factor**2 / shape.head_dim**0.5}


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
    """Return the aggregation of the tokens' losses: a name of `algorithms.aggregation`."""
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
