"""Every slime flag, and Megatron-LM flag in slime's launch scripts, that fusionrl does not have. Pure.

One entry per flag. Its kind says how it is treated:

SHAPE      config.json has this value: compared, and accepted silently if equal
RENAMED    replaced by another flag (`text`), which the user could pass instead
NO_EFFECT  accepted; the plan says why it changes nothing
REFUSED    an error, with the reason and what to do instead

A flag that fusionrl has needs no entry. DIFFERS lists those whose meaning or default differs.
"""

from __future__ import annotations

import enum
from functools import partial
from typing import NamedTuple

from fusionrl.config.aliases import cure_for
from fusionrl.config.hooks import flag_of


class Kind(enum.Enum):
    """How a flag is treated."""

    SHAPE = "compared"
    RENAMED = "renamed"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Entry(NamedTuple):
    """One flag.

    kind     how it is treated
    arity    number of values: 0, 1, 2, or -1 for all up to the next flag
    text     for people: the flag to write, or the reason
    neutral  values of a refused flag that match what fusionrl does: accepted, without effect
    """

    kind: Kind
    arity: int
    text: str
    neutral: tuple[str, ...] = ()

    def accept(self, name: str, values: list[str], accepted: dict[str, object]) -> str | None:
        """Put the flag `name` into `accepted` if it is compared or has no effect; otherwise return the error."""
        flag = flag_of(name)
        if len(values) < (1 if self.arity < 0 else self.arity):
            cure = cure_for(flag)
            return f"{flag}: it needs a value" + (f"; {cure}" if cure else "")
        text = " ".join([flag, *([] if name in SECRETS else values)])
        if self.kind is Kind.RENAMED:
            return f"{text}: slime's name; use {self.text}"
        if self.kind is Kind.REFUSED and not (self.neutral and values and values[0] in self.neutral):
            return f"{text}: {self.text}"
        if self.arity == 0 and values:
            if values[0].lower() == "true":
                values = []
            elif values[0].lower() == "false":
                return None
            else:
                return f"{text}: it takes no value"
        if name not in SECRETS:
            accepted[name] = values if self.arity < 0 else (values[0] if values else True)
        return None


_shape = partial(Entry, Kind.SHAPE)
_renamed = partial(Entry, Kind.RENAMED)
_idle = partial(Entry, Kind.NO_EFFECT)


def _refused(arity: int, text: str, *neutral: str) -> Entry:
    return Entry(Kind.REFUSED, arity, text, neutral)


def _alike(entry: Entry, names: str) -> dict[str, Entry]:
    """Return one entry under several names."""
    return dict.fromkeys(names.split(), entry)


# ------------------------------------------------------------------------------------------------ the model's shape
_NO_FAMILY = "no family here has it"
SHAPES: dict[str, Entry] = {
    "num_layers": _shape(1, "num_hidden_layers"),
    "hidden_size": _shape(1, "hidden_size"),
    "ffn_hidden_size": _shape(1, "intermediate_size"),
    "num_attention_heads": _shape(1, "num_attention_heads"),
    "group_query_attention": _shape(0, "num_key_value_heads below num_attention_heads"),
    "num_query_groups": _shape(1, "num_key_value_heads"),
    "kv_channels": _shape(1, "head_dim"),
    "vocab_size": _shape(1, "vocab_size"),
    "normalization": _shape(1, "RMSNorm, in all families"),
    **_alike(_shape(1, "rms_norm_eps"), "norm_epsilon layernorm_epsilon"),
    "swiglu": _shape(0, "hidden_act silu, in all families"),
    "disable_bias_linear": _shape(0, "no biases but those of queries, keys and values"),
    "add_qkv_bias": _shape(0, "biases of queries, keys and values"),
    "qk_layernorm": _shape(0, "norms of queries and keys"),
    "untie_embeddings_and_output_weights": _shape(0, "tie_word_embeddings false"),
    "post_self_attn_layernorm": _shape(0, "norms after attention"),
    "post_mlp_layernorm": _shape(0, "norms after the MLP"),
    "apply_layernorm_1p": _shape(0, f"norms that add 1 to their weights: {_NO_FAMILY}"),
    **_alike(_shape(0, f"a gate after attention: {_NO_FAMILY}"), "attention_output_gate use_gated_attention"),
    "position_embedding_type": _shape(1, "rope, in all families"),
    "use_rotary_position_embeddings": _shape(0, "rotary embeddings, in all families"),
    "no_position_embedding": _shape(0, "no learned positions, in all families"),
    "rotary_base": _shape(1, "rope_theta"),
    "rotary_percent": _shape(1, "partial_rotary_factor"),
    "rotary_interleaved": _shape(0, "pairs of neighbours are rotated"),
    "use_rope_scaling": _shape(0, "rope_scaling of Llama 3"),
    **_alike(_shape(1, "rope_scaling.factor"), "rope_scaling_factor rotary_scaling_factor"),
    "mscale": _shape(1, "rope_scaling.mscale"),
    "mscale_all_dim": _shape(1, "rope_scaling.mscale_all_dim"),
    "multi_latent_attention": _shape(0, "latent attention"),
    "q_lora_rank": _shape(1, "q_lora_rank"),
    "kv_lora_rank": _shape(1, "kv_lora_rank"),
    "qk_head_dim": _shape(1, "qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _shape(1, "qk_rope_head_dim"),
    "v_head_dim": _shape(1, "v_head_dim"),
    "num_experts": _shape(1, "num_experts"),
    "moe_layer_freq": _shape(1, "the layers that have experts"),
    "moe_ffn_hidden_size": _shape(1, "moe_intermediate_size"),
    "moe_router_topk": _shape(1, "num_experts_per_tok"),
    "moe_shared_expert_intermediate_size": _shape(1, "width of the shared experts"),
    "moe_shared_expert_gate": _shape(0, "a gate of the shared expert"),
    "moe_router_score_function": _shape(1, "softmax or sigmoid, by family"),
    "moe_router_pre_softmax": _shape(0, "norm_topk_prob false"),
    "moe_router_enable_expert_bias": _shape(0, "a bias of the choice of experts, by family"),
    "moe_router_num_groups": _shape(1, "n_group"),
    "moe_router_group_topk": _shape(1, "topk_group"),
    "moe_router_topk_scaling_factor": _shape(1, "routed_scaling_factor"),
}

# ------------------------------------------------------------------------------------------------ other names
RENAMED: dict[str, Entry] = {
    "save": _renamed(1, "--run-dir: checkpoints lie in the run's folder"),
    "load": _renamed(
        1,
        "--resume where it is the folder of --save; a torch_dist folder: --megatron-checkpoint; a Hugging Face folder:"
        " --hf-checkpoint; a folder that is not there: left out, as in slime",
    ),
    "ckpt_step": _renamed(1, "the folder iter_… of --load"),
    "ref_ckpt_step": _renamed(1, "the folder iter_… of --ref-load"),
    "opd_teacher_ckpt_step": _renamed(1, "the folder iter_… of --opd-teacher-load"),
    "offload": _renamed(0, "--offload-train always --offload-rollout"),
    "bf16": _renamed(0, "--precision bf16"),
    "fp8_format": _renamed(1, "--fp8"),
    "no_rope_fusion": _renamed(0, "--no-apply-rope-fusion"),
    "decoder_first_pipeline_num_layers": _renamed(1, "--num-layers-in-first-pipeline-stage"),
    "decoder_last_pipeline_num_layers": _renamed(1, "--num-layers-in-last-pipeline-stage"),
    "check_weight_update_equal": _renamed(0, "--verify-weights always"),
    "sglang_router_request_timeout_secs": _renamed(1, "--router-request-timeout-secs"),
    "sglang_router_port": _renamed(1, "--router-port"),
    "sglang_router_policy": _renamed(1, "--router-policy"),
    "disable_rollout_global_dataset": _renamed(
        0,
        "--data-source-path fusionrl.buffer.data_source.RolloutDataSourceWithBuffer without --prompt-data: its samples"
        " are empty; left out where a class of your own is given",
    ),
    "spec": _renamed(
        -1,
        "--custom-spec-path MODULE.FUNCTION; slime_plugins.models is left out: the family builds it",
    ),
}

# ------------------------------------------------------------------------------------------------ nothing to do
_WANDB = "`fusionrl track RUN --to wandb --follow` sends a run's metrics.jsonl to W&B, also during the run"
_FOLDER = "every sample is in the run's folder, rollouts/"
_CI = "a check for slime's CI; here --verify-weights and the train/logprob metrics cover it"
_PROFILE = "--profile-steps has profiles of other steps and tools; `fusionrl timeline` has the times of all"
_SESSIONS = (
    "the session proxy starts when a function or an agent opens a session, on a free port (docs/guides/agents.md)"
)
_MEMORY = "memory is saved by --offload-train, --optimizer-cpu-offload and --recompute-granularity: the same values"
_METRICS = "each step's times, memory and throughput are in metrics.jsonl and event files"
NO_EFFECT: dict[str, Entry] = {
    **_alike(
        _idle(0, "always on here"),
        "accumulate_allreduce_grads_in_fp32 use_distributed_optimizer balance_by_flops use_mcore_models",
    ),
    "attention_backend": _idle(1, "Transformer Engine takes the fastest that fits (flash); on a CPU there is one"),
    "use_flash_attn": _idle(0, "Transformer Engine takes the fastest that fits (flash)"),
    "no_check_for_nan_in_loss_and_grad": _idle(
        0, "a step that is not finite is skipped and counted instead of ending the run (--max-skipped-steps)"
    ),
    "seq_length": _idle(1, "sequences are packed at their own lengths"),
    "max_position_embeddings": _idle(1, "rotary embeddings have no table of positions"),
    **_alike(
        _idle(1, "the vocabulary is padded as the layout needs it"), "make_vocab_size_divisible_by padded_vocab_size"
    ),
    "enable_experimental": _idle(0, "no layer here is an experimental Megatron-core layer"),
    "save_retain_interval": _idle(1, "every checkpoint is kept; --keep-checkpoints N keeps the N newest"),
    "no_save_optim": _idle(0, "checkpoints always hold the optimizer, so that a resume is exact"),
    **_alike(_idle(0, "--load of another's checkpoint reads the weights alone"), "no_load_optim no_load_rng finetune"),
    **_alike(
        _idle(1, "log-prob passes take --max-tokens-per-gpu"), "ref_micro_batch_size log_probs_max_tokens_per_gpu"
    ),
    "recompute_loss_function": _idle(0, "logits are made in slices (--log-probs-chunk-size), none is kept"),
    "data_pad_size_multiplier": _idle(1, "micro-batches are padded by what the layout needs alone"),
    "megatron_to_hf_mode": _idle(1, "one table of names serves both directions"),
    "qkv_format": _idle(1, "sequences are always packed (thd)"),
    **_alike(
        _idle(1, "read from config.json"), "model_name original_max_position_embeddings beta_fast beta_slow rope_type"
    ),
    "qwen_gdn_backend": _idle(1, "no family here has linear attention"),
    "allgather_cp": _idle(
        0, "a layout of context parallelism for sparse attention, which no family here has; the others have one layout"
    ),
    "prefill_num_servers": _idle(1, "each engine prefills and decodes: the same tokens at another speed"),
    "freeze_indexer": _idle(0, "no family here has an indexer"),
    "keep_old_actor": _idle(0, "a rollout is trained on by the weights that made it: they are the old actor"),
    "mtp_num_layers": _idle(
        1,
        "the layer of multi-token prediction is not loaded: it trains nothing without"
        " --enable-mtp-training, and engines have the checkpoint's",
    ),
    "mtp_loss_scaling_factor": _idle(1, "it belongs to --enable-mtp-training"),
    "use_rollout_entropy": _idle(0, "train/entropy is always reported"),
    "get_mismatch_metrics": _idle(0, "they are always reported"),
    "critic_save": _idle(1, "the critic is in the run's checkpoints"),
    **_alike(_idle(0, _WANDB), "use_wandb disable_wandb_random_suffix wandb_always_use_train_step"),
    **_alike(
        _idle(1, _WANDB),
        "wandb_mode wandb_dir wandb_key wandb_host wandb_team wandb_group wandb_project wandb_run_id wandb_exp_name"
        " wandb_entity",
    ),
    **_alike(_idle(1, "event files lie in the run's folder"), "tb_project_name tb_experiment_name tensorboard_dir"),
    "log_multi_turn": _idle(0, f"numbers of turns are not reported; {_FOLDER}"),
    "log_passrate": _idle(0, "an evaluation of several samples a prompt reports it"),
    "log_reward_category": _idle(1, f"rewards are not reported by category; {_FOLDER}"),
    "log_correct_samples": _idle(0, _FOLDER),
    "save_debug_train_data": _idle(1, f"train data are not written; {_FOLDER}"),
    "dump_details": _idle(1, _FOLDER),
    **_alike(_idle(0, _PROFILE), "record_memory_history use_pytorch_profiler profile"),
    **_alike(
        _idle(1, _PROFILE),
        "memory_snapshot_dir memory_snapshot_num_steps memory_recorder memory_snapshot_path profile_step_start"
        " profile_step_end",
    ),
    "profile_target": _idle(-1, _PROFILE),
    "http_proxy": _idle(1, "nothing reads it in slime either"),
    "use_distributed_post": _idle(0, "requests are posted by one process, with a limit for each engine"),
    **_alike(_idle(0, "SGLang's router is started (--router-*)"), "use_slime_router use_miles_router"),
    **_alike(
        _idle(1, "fusionrl does not read it; your own rollout function finds it in its args"),
        "rollout_buffer_url fetch_trajectory_retry_times min_batch_collection_ratio rollout_task_type",
    ),
    **_alike(
        _idle(1, "rollouts travel through Ray's object store: the same data, another speed"),
        "rollout_data_transport object_store_backend mooncake_store_init_kwargs",
    ),
    "use_session_server": _idle(0, _SESSIONS),
    **_alike(_idle(1, _SESSIONS), "session_server_ip tito_model"),
    "session_server_port": _idle(-1, _SESSIONS),
    **_alike(_idle(1, "it belongs to --opd-log-prob-top-k"), "opd_top_k_strategy opd_reward_weight_mode"),
    "update_weight_transfer_mode": _idle(1, "weights are pushed by --update-weight-transport: the same weights"),
    **_alike(_idle(0, _MEMORY), "rematerialize_param_from_master_weight offload_ref offload_old_actor"),
    **_alike(_idle(1, _MEMORY), "train_memory_margin_bytes offload_train_target offload_train_disk_dir"),
    "tokenizer_type": _idle(1, "the tokenizer is that of --hf-checkpoint"),
    "grad_reduce_in_bf16": _idle(0, "gradients are summed in fp32"),
    **_alike(_idle(0, "the same values, another kernel"), "no_bias_swiglu_fusion no_bias_gelu_fusion"),
    **_alike(
        _idle(0, _METRICS),
        "log_throughput log_timers_to_tensorboard log_memory_to_tensorboard log_progress log_straggler"
        " log_device_memory_used log_throughput_to_tensorboard use_prometheus use_miles_dashboard",
    ),
    **_alike(_idle(1, _METRICS), "prometheus_port prometheus_run_name dashboard_sglang_scrape_mode"),
    **_alike(
        _idle(0, _CI),
        "ci_test ci_disable_logprobs_checker ci_disable_weight_update_checker ci_save_model_hash ci_check_model_hash"
        " ci_disable_kl_checker",
    ),
    **_alike(
        _idle(1, _CI),
        "ci_metric_checker_key ci_metric_checker_threshold ci_train_rollout_logprob_abs_diff_threshold"
        " ci_save_grad_norm ci_load_grad_norm",
    ),
}

# ------------------------------------------------------------------------------------------------ not here
_ALL_TRAINED = "all weights are trained here; leave it out"
_NO_ADAPTERS = "all weights are trained, without adapters; leave it out"
_WRITTEN = "`fusionrl from-slime` writes the flags for a file that it finds"
REFUSED: dict[str, Entry] = {
    "train_backend": _refused(1, "Megatron-core trains; leave it out", "megatron"),
    "optimizer": _refused(1, "the optimizer is Adam (--adam-beta1, --adam-beta2, --adam-eps); leave it out", "adam"),
    "fp16": _refused(0, "fp16 training is not supported; use --precision bf16"),
    "distributed_backend": _refused(1, "it follows from --device: nccl on GPUs, gloo on a CPU", "nccl"),
    "train_env_vars": _refused(
        1, "trainers get the environment of the command; export the variables before it", "{}", "null"
    ),
    "release_train": _refused(0, "trainers keep running and release memory with --offload-train always; use that"),
    **_alike(_refused(-1, _ALL_TRAINED), "only_train_params_name_list freeze_params_name_list"),
    "multimodal_keys": _refused(1, "not available yet (multimodal data is still to come); leave it out"),
    "start_rollout_id": _refused(1, "a resumed run starts after its checkpoint (--resume); leave it out", "0"),
    "eval_tool_key": _refused(1, "evaluation sets have --tool-key, or tool_key of their own in --eval-config"),
    "eval_max_prompt_len": _refused(1, "evaluation sets have --rollout-max-prompt-len; leave it out"),
    "eval_max_context_len": _refused(1, "evaluation sets have --rollout-max-context-len; leave it out"),
    "eval_min_new_tokens": _refused(
        1, "evaluation sets have --rollout-min-response-len, or min_new_tokens of their own in --eval-config", "0"
    ),
    **_alike(_refused(0, _NO_ADAPTERS), "use_lora lora_base_cpu_backup experts_shared_outer_loras"),
    "lora_rank": _refused(1, _NO_ADAPTERS, "0"),
    **_alike(_refused(1, _NO_ADAPTERS), "lora_alpha lora_dropout lora_target_modules target_modules"),
    "opd_log_prob_top_k": _refused(
        1, "distillation takes the log-probs of the sampled tokens alone; leave it out", "0"
    ),
    "moe_router_freeze_gate": _refused(0, _ALL_TRAINED),
    "use_dynamic_global_batch_size": _refused(
        0, "an optimizer step takes --global-batch-size samples, or a rollout's share by --num-steps-per-rollout"
    ),
    "megatron_config_path": _refused(
        1, f"a critic has flags of its own: --critic-lr, --critic-load and their like; {_WRITTEN}"
    ),
    "ref_update_interval": _refused(1, "the reference model stays as it is; leave it out"),
    "disable_compute_advantages_and_returns": _refused(
        0,
        "advantages follow from --advantage-estimator; for your own: --custom-advantage-function-path. Conversations"
        " are trained on by --mode sft, where nothing computes them",
    ),
    "reset_optimizer_states": _refused(0, "the optimizer keeps its states over all rollouts; leave it out"),
    "use_stateless_adam": _refused(0, "Adam keeps its states; --optimizer-cpu-offload takes them off the GPU"),
    "enable_mtp_training": _refused(
        0,
        "layers of multi-token prediction are not trained; leave it out (engines still speculate with the"
        " checkpoint's: --sglang-speculative-algorithm)",
    ),
    "load_forge_rollout_data": _refused(1, "saved rollouts are trained on without engines: --load-debug-rollout-data"),
    "load_debug_rollout_data_subsample": _refused(1, "all of a saved rollout is trained on; leave it out", "1", "1.0"),
    **_alike(
        _refused(-1, "trainers have no DeepGEMM forward pass; leave it out"),
        "megatron_deepgemm_forward_layers megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers"
        " megatron_deepgemm_moe_forward_modules",
    ),
    "sglang_config": _refused(
        1, f"its groups are texts here: --engine-group NAME:num_gpus=N,per_engine=N,FLAG=VALUE; {_WRITTEN}"
    ),
    "sglang_router_ip": _refused(
        1, "a run starts its own router, with a key of its own; leave it out (--router-port chooses the port)"
    ),
}

TABLE: dict[str, Entry] = SHAPES | RENAMED | NO_EFFECT | REFUSED
SECRETS = frozenset({"wandb_key"})  # neither shown nor kept

# ------------------------------------------------------------------------------------------------ ours, but otherwise
DIFFERS: dict[str, str] = {
    "ref_load": "without --load, slime starts the policy with it, too; here a torch_dist folder does so (it becomes"
    " --megatron-checkpoint), and a Hugging Face folder is the reference alone: the policy starts with --hf-checkpoint",
    "offload_train": "takes auto, always or never; --offload-train and --no-offload-train alone are always and never",
    "micro_batch_size": "left out with --use-dynamic-batch-size, where slime ignores it; alone, the maximum samples of"
    " a micro-batch",
    "use_dynamic_batch_size": "always so",
    "balance_data": "always so",
    "update_weight_transport": "nccl is auto: ipc when colocated, else broadcast",
    "log_probs_chunk_size": "-1 is left out: logits are made in slices of about 32 MiB",
    "rollout_function_path": "slime's sft_rollout is --mode sft",
    "opd_type": "sglang starts the teacher's engines itself, from --opd-teacher-load; without it your functions call"
    " your own teacher, as in slime (--custom-rm-path, --custom-reward-post-process-path)",
    "load_debug_rollout_data": "also needs --debug-train-only, which slime sets itself",
    "use_fault_tolerance": "a dead engine is started anew before the next push",
    "custom_config_path": "its values override the command line, as in slime",
    "sglang_dp_size": "with --sglang-enable-dp-attention left out: tensor parallelism alone divides an engine",
    "sglang_enable_dp_attention": "left out: tensor parallelism alone divides an engine",
    "sglang_tp_size": "left out where it is --rollout-num-gpus-per-engine, which counts in slime, too",
    "sglang_dtype": "is --rollout-dtype",
}
