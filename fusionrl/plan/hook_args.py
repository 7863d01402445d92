"""Values from the plan for names of slime's `args` that are not flags here, and for flags left open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fusionrl.config.config import Config
from fusionrl.models.shape import ModelShape
from fusionrl.models.shape_claims import RIGHT_VALUES

if TYPE_CHECKING:
    from fusionrl.plan.plan import Plan

# What slime can do and fusionrl does not do: off, as slime's flags are where they are not given.
_FALSE = """
    ci_test use_wandb wandb_always_use_train_step use_distributed_post log_passrate log_multi_turn use_critic
    use_pytorch_profiler record_memory_history keep_old_actor use_rollout_entropy
    sglang_enable_deterministic_inference use_tensorboard allgather_cp
"""
_NONE = """
    wandb_mode wandb_dir wandb_key wandb_host wandb_team wandb_group wandb_project wandb_run_id tb_project_name
    tb_experiment_name tensorboard_dir dump_details save_debug_train_data log_reward_category
    sglang_model_routers sglang_speculative_algorithm eval_min_new_tokens rollout_buffer_url chat_template_path
    load_forge_rollout_data
"""
_OFF: dict[str, object] = {
    **dict.fromkeys(_FALSE.split(), False),
    **dict.fromkeys(_NONE.split()),
    "wandb_random_suffix": True,
    "sglang_dp_size": 1,
    "qkv_format": "thd",
    "rollout_global_dataset": True,
    "rollout_task_type": "math",
    "fetch_trajectory_retry_times": -1,
    "start_rollout_id": 0,
}


def slime_args(config: Config, plan: Plan) -> dict[str, object]:
    """Return slime's names with the run's values, of those that no flag sets, and the flags that were left open."""
    shape, layout, batch = plan.shape, plan.layout, plan.batch
    data, rollout, algorithm = config.data, config.rollout, config.algorithm
    num_engines = len(plan.engine_bundles)
    values: dict[str, object] = {
        **_OFF,
        **_model(shape),
        "rollout_num_engines": num_engines,
        "rollout_num_gpus": sum(len(bundles) for bundles in plan.engine_bundles),
        "router_policy": config.passthrough.router.get("policy", "cache_aware"),
        "sglang_router_policy": config.passthrough.router.get("policy", "cache_aware"),
        "over_sampling_batch_size": rollout.over_sampling_batch_size or rollout.rollout_batch_size,
        "global_batch_size": batch.global_batch_size if batch else None,
        "eval_max_context_len": rollout.rollout_max_context_len,
        "eval_max_prompt_len": data.rollout_max_prompt_len,
        "grpo_std_normalization": not algorithm.disable_grpo_std_normalization,
        "rewards_normalization": not algorithm.disable_rewards_normalization,
        "debug_rollout_only": False,
        "sequence_parallel": layout is not None and layout.tp > 1,
    }
    if layout is not None:
        values |= {"world_size": layout.world_size, "data_parallel_size": layout.dp}
    flags = vars(config.to_args())
    return {name: value for name, value in values.items() if flags.get(name) is None} | {
        "num_rollout": plan.num_rollout,
        "device": plan.device,
        "train_num_threads": plan.train_num_threads,
        "precision": plan.precision,
        "num_steps_per_rollout": batch.num_steps if batch else None,
        "multimodal_keys": data.multimodal_keys or None,  # as slime's functions know it
        "lr_decay_iters": config.train.lr_decay_iters or plan.num_optimizer_steps or None,
    }


def _model(shape: ModelShape) -> Mapping[str, object]:
    """Sizes of the model, under Megatron's names; None for those of experts that it lacks."""
    values = {name: right(shape) for name, right in RIGHT_VALUES.items()}
    if not shape.num_experts:
        values |= dict.fromkeys(name for name in values if name == "num_experts" or name.startswith("moe_"))
    return values | {
        "ffn_hidden_size": shape.ffn_hidden_size,
        "kv_channels": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rotary_percent": shape.rotary_percent,
        "add_qkv_bias": shape.attention_bias,
        "moe_grouped_gemm": False,
        "moe_use_legacy_grouped_gemm": False,
        "mtp_num_layers": shape.mtp_layers or None,
        "fp16_lm_cross_entropy": False,
    }
