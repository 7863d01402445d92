"""Names that other trainers give to what has another name here, and what to write instead.

A key has the names that share a cure, which names fusionrl flags (a test checks that they exist), or says why none does
it. A name that is a flag here with another meaning is not in these tables.
"""

import re
from collections.abc import Collection, Iterable

from fusionrl.algorithms.estimators import NONZERO_STD
from fusionrl.base.wording import closest

_ALWAYS = "leave it out: it is always so here"
_LOW_RANK = "leave it out: adapters are LoRA's alone (--lora-rank; rsLoRA: --lora-use-rslora)"
_NOT_QUANTISED = "leave it out: trainers hold the weights as --precision says"
_BATCH = "--rollout-batch-size (prompts of a rollout) or --global-batch-size (samples of an optimizer step)"
_NO_SUCH_FLAG = "leave it out: there is nothing like it here"

# transformers' TrainingArguments, and TRL's GRPOConfig, SFTConfig and scripts.
TRL: dict[str, str] = {
    "adam_beta_1": "--adam-beta1",
    "adam_beta_2": "--adam-beta2",
    "adam_epsilon": "--adam-eps",
    "attn_implementation": "--attention-backend",
    "beta": "--use-kl-loss --kl-loss-coef (for DPO: --dpo-beta)",
    "chat_template_kwargs": "--apply-chat-template-kwargs",
    "dataloader_num_workers min_p use_liger_kernel": _NO_SUCH_FLAG,
    "dataset train_dataset": "--prompt-data",
    "dataset_name": "--prompt-data (NAME:SPLIT)",
    "dataset_test_split": "--eval-prompt-data (NAME PATH:SPLIT)",
    "dataset_text_field": "--input-key",
    "dataset_train_split": "--prompt-data (PATH:SPLIT)",
    "deepspeed fsdp": "leave it out: --tensor-model-parallel-size and its like divide the model",
    "delta": "--eps-clip-c",
    "do_eval": "--eval-interval with --eval-prompt-data",
    "do_train": "--mode rl or --mode sft",
    "epsilon": "--eps-clip",
    "epsilon_high": "--eps-clip-high",
    "eval_dataset": "--eval-prompt-data",
    "eval_on_start": "leave it out: it is so; --skip-eval-before-train turns it off",
    "eval_steps eval_strategy evaluation_strategy": "--eval-interval",
    "generation_batch_size": "--rollout-batch-size (prompts) x --n-samples-per-prompt",
    "gradient_accumulation_steps": "--global-batch-size: the samples of one optimizer step; micro-batches follow",
    "gradient_checkpointing": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "importance_sampling_level": "--policy-loss gspo for `sequence`",
    "learning_rate": "--lr",
    "load_best_model_at_end": "--keep-best with --keep-checkpoints",
    "log_completions": "leave it out: every sample is in the run's folder, rollouts/",
    "logging_dir": "--run-dir",
    "logging_steps": "leave it out: every step is reported",
    "load_in_4bit load_in_8bit": _NOT_QUANTISED,
    "lora_modules_to_save lora_task_type use_dora": _LOW_RANK,
    "lora_r use_peft": "--lora-rank",
    "lora_target_modules": "--target-modules",
    "lr_scheduler_type": "--lr-decay-style",
    "mask_truncated_completions": "--rollout-sample-filter-path (a function that sets remove_sample)",
    "max_completion_length max_new_tokens": "--rollout-max-response-len",
    "max_grad_norm": "--clip-grad",
    "max_length max_seq_length": "--max-tokens-per-gpu bounds a conversation in --mode sft; longer ones are an error",
    "max_prompt_length": "--rollout-max-prompt-len",
    "max_steps": "--num-rollout (rollouts, each of --num-steps-per-rollout optimizer steps)",
    "model model_name model_name_or_path model_path": "--hf-checkpoint",
    "num_completions num_generations": "--n-samples-per-prompt",
    "num_epochs num_train_epochs": "--num-epoch",
    "num_iterations": "leave it out: each sample is trained on once; --num-steps-per-rollout divides a rollout",
    "optim": "leave it out: the optimizer is Adam (--adam-beta1, --adam-beta2, --adam-eps)",
    "output_dir": "--run-dir (the weights: --save-hf)",
    "packing": _ALWAYS,
    "per_device_eval_batch_size": "leave it out: engines batch by themselves; --sglang-max-running-requests",
    "per_device_train_batch_size": "--micro-batch-size (of one rank's pass; one optimizer step: --global-batch-size)",
    "report_to": "--use-tensorboard",
    "resume_from_checkpoint": "--resume with --run-dir",
    "reward_funcs": "--rm-type or --custom-rm-path",
    "reward_model_name_or_path": "--rm-model with --rm-type reward_model",
    "reward_weights": "--rm-type with weights, as in math:0.8+format:0.2",
    "run_name": "--name",
    "save_steps save_strategy": "--save-interval",
    "save_total_limit": "--keep-checkpoints",
    "scale_rewards": "--disable-grpo-std-normalization (for False)",
    "steps_per_generation": "--num-steps-per-rollout",
    "sync_ref_model": "leave it out: the reference model stays as it is",
    "temperature": "--rollout-temperature",
    "top_k": "--rollout-top-k",
    "top_p": "--rollout-top-p",
    "torch_dtype": "--precision",
    "use_rslora": "--lora-use-rslora",
    "use_vllm": "leave it out: SGLang generates",
    "vllm_gpu_memory_utilization": "--sglang-mem-fraction-static",
    "vllm_importance_sampling_cap": "--use-tis --tis-clip",
    "vllm_importance_sampling_correction": "--use-tis",
    "vllm_mode": "--colocate",
    "vllm_tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "warmup_ratio": "--lr-warmup-iters (optimizer steps)",
    "warmup_steps": "--lr-warmup-iters",
}

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_LORA = "actor_rollout_ref.model.lora."
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

# A setting that is not here may be answered by the last part of its name, see `cure_for`.
VERL: dict[str, str] = {
    "actor_rollout_ref.model.path": "--hf-checkpoint",
    "actor_rollout_ref.model.custom_chat_template": "leave it out: the template is that of --hf-checkpoint's tokenizer",
    "actor_rollout_ref.model.enable_gradient_checkpointing": TRL["gradient_checkpointing"],
    **{f"{_LORA}{name}": f"--lora-{name}" for name in ("rank", "alpha", "dropout")},
    _LORA + "adapter_path": "--lora-adapter-path",
    _LORA + "dropout_position": "leave it out: dropout is before A (--lora-dropout)",
    _LORA + "dtype": "--precision",
    _LORA + "lora_A_init_method " + _LORA + "lora_B_init_method": "--lora-init",
    _LORA + "merge": "--lora-push merged (for True)",
    _LORA + "type": _LOW_RANK,
    "actor_rollout_ref.model.use_remove_padding": _ALWAYS,
    "actor_rollout_ref.hybrid_engine": "--colocate",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "--max-tokens-per-gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "--max-tokens-per-gpu",
    "actor_rollout_ref.ref.model.path": "--ref-load",
    _ACTOR + "clip_ratio": "--eps-clip",
    _ACTOR + "clip_ratio_low": "--eps-clip",
    _ACTOR + "clip_ratio_high": "--eps-clip-high",
    _ACTOR + "clip_ratio_c": "--eps-clip-c",
    _ACTOR + "entropy_coeff": "--entropy-coef",
    _ACTOR + "fsdp_config.param_offload": "--offload-train",
    _ACTOR + "fsdp_config.optimizer_offload": "--optimizer-cpu-offload",
    _ACTOR + "loss_agg_mode": "--loss-aggregation (token-mean: token_mean; seq-mean-token-mean: sequence_mean;"
    " seq-mean-token-sum-norm: constant)",
    _ACTOR + "megatron.optimizer_offload": "--optimizer-cpu-offload",
    _ACTOR + "megatron.param_offload": "--offload-train",
    _ACTOR + "megatron.sequence_parallel": "--sequence-parallel",
    _ACTOR + "optim.betas": "--adam-beta1 and --adam-beta2",
    _ACTOR + "optim.lr_decay_steps": "--lr-decay-iters",
    _ACTOR + "optim.lr_warmup_steps": "--lr-warmup-iters",
    _ACTOR + "optim.lr_warmup_steps_ratio": "--lr-warmup-iters (optimizer steps)",
    _ACTOR + "optim.total_training_steps": "--lr-decay-iters",
    _ACTOR + "policy_loss.loss_mode": "--policy-loss",
    _ACTOR + "policy_loss.clip_cov_ratio": "--clip-cov-fraction",
    _ACTOR + "policy_loss.clip_cov_lb": "--clip-cov-low",
    _ACTOR + "policy_loss.clip_cov_ub": "--clip-cov-high",
    _ACTOR + "policy_loss.kl_cov_ratio": "--kl-cov-fraction",
    _ACTOR + "policy_loss.ppo_kl_coef": "--kl-cov-coef",
    _ACTOR + "ppo_epochs": TRL["num_iterations"],
    _ACTOR + "ppo_max_token_len_per_gpu": "--max-tokens-per-gpu",
    _ACTOR + "ppo_micro_batch_size": "--micro-batch-size",
    _ACTOR + "ppo_micro_batch_size_per_gpu": "--micro-batch-size",
    _ACTOR + "ppo_mini_batch_size": "--num-steps-per-rollout, or --global-batch-size: in samples here, so that number x"
    " --n-samples-per-prompt",
    _ACTOR + "strategy": "leave it out: Megatron-core trains",
    _ACTOR + "ulysses_sequence_parallel_size": "--context-parallel-size",
    _ACTOR + "use_dynamic_bsz": "--use-dynamic-batch-size",
    _ROLLOUT + "calculate_log_probs": _ALWAYS,
    _ROLLOUT + "dtype": "--rollout-dtype",
    _ROLLOUT + "enable_chunked_prefill": "--sglang-chunked-prefill-size",
    _ROLLOUT + "enforce_eager": "--sglang-disable-cuda-graph",
    _ROLLOUT + "free_cache_engine": "--offload-rollout",
    _ROLLOUT + "gpu_memory_utilization": "--sglang-mem-fraction-static",
    _ROLLOUT + "ignore_eos": "--rollout-ignore-eos",
    _ROLLOUT + "log_prob_micro_batch_size_per_gpu": "--max-tokens-per-gpu",
    _ROLLOUT + "log_prob_max_token_len_per_gpu": "--max-tokens-per-gpu",
    _ROLLOUT + "max_model_len": "--rollout-max-context-len",
    _ROLLOUT + "max_num_batched_tokens": "--sglang-chunked-prefill-size",
    _ROLLOUT + "max_num_seqs": "--sglang-max-running-requests",
    _ROLLOUT + "mode": _ALWAYS,
    _ROLLOUT + "multi_turn.enable": "--custom-generate-function-path fusionrl.rollout.agent.generate",
    _ROLLOUT + "multi_turn.format": "--tool-call-parser",
    _ROLLOUT + "multi_turn.max_assistant_turns": "--max-turns",
    _ROLLOUT + "multi_turn.max_tool_response_length": "--max-tool-response-len",
    _ROLLOUT + "multi_turn.tool_config_path": "--tools-path",
    _ROLLOUT + "n": "--n-samples-per-prompt",
    _ROLLOUT + "name": "leave it out: SGLang generates",
    _ROLLOUT + "prompt_length": "--rollout-max-prompt-len",
    _ROLLOUT + "seed": "--rollout-seed",
    _ROLLOUT + "tensor_model_parallel_size": "--rollout-num-gpus-per-engine",
    _ROLLOUT + "update_weights_bucket_megabytes": "--update-weight-buffer-size (bytes)",
    _ROLLOUT + "val_kwargs.n": "--n-samples-per-eval-prompt",
    _ROLLOUT + "val_kwargs.temperature": "--eval-temperature",
    _ROLLOUT + "val_kwargs.top_k": "--eval-top-k",
    _ROLLOUT + "val_kwargs.top_p": "--eval-top-p",
    "algorithm.adv_estimator": "--advantage-estimator",
    "algorithm.filter_groups.enable": f"--dynamic-sampling-filter-path {NONZERO_STD}",
    "algorithm.kl_penalty": "--kl-coef-type",
    "algorithm.lam": "--lambd",
    "algorithm.norm_adv_by_std_in_grpo": "--disable-grpo-std-normalization (for False)",
    "algorithm.rollout_is_threshold": "--use-tis --tis-clip",
    "algorithm.use_kl_in_reward": "--kl-coef (above 0: it is so)",
    "critic.cliprange_value": "--value-clip",
    "critic.model.path": "--critic-load",
    "critic.optim.lr": "--critic-lr",
    "critic.optim.lr_warmup_steps": "--critic-lr-warmup-iters",
    "custom_reward_function.name custom_reward_function.path": "--custom-rm-path FILE.py:FUNCTION",
    "data.custom_cls.path": "--data-source-path",
    "data.filter_overlong_prompts": "leave it out: --rollout-max-prompt-len does so",
    "data.reward_fn_key": "leave it out: a sample of a mixture has its set's name in metadata['data_source']",
    "data.seed": "--rollout-seed",
    "data.shuffle": "--rollout-shuffle",
    "data.tool_config_path": "--tools-path",
    "data.train_batch_size": "--rollout-batch-size",
    "data.train_max_samples": "--prompt-data (PATH@[:N])",
    "data.truncation": "leave it out: --rollout-max-prompt-len leaves longer prompts out",
    "data.val_batch_size": TRL["per_device_eval_batch_size"],
    "data.val_files": "--eval-prompt-data (pairs of name and file)",
    "reward_model.enable": "--rm-type reward_model with --rm-model",
    "reward_model.model.path": "--rm-model with --rm-type reward_model",
    "reward_model.overlong_buffer.enable reward_model.overlong_buffer.len": "--overlong-buffer-len",
    "reward_model.overlong_buffer.penalty_factor": "--overlong-penalty-factor",
    "reward_model.reward_manager": "--rm-type",
    "reward_model.sandbox_fusion.url": "--rm-type code (in a sandbox on the node)",
    "trainer.critic_warmup": "--num-critic-only-steps",
    "trainer.default_local_dir": "--run-dir",
    "trainer.logger": "--use-tensorboard",
    "trainer.max_actor_ckpt_to_keep": "--keep-checkpoints",
    "trainer.n_gpus_per_node": "--actor-num-gpus-per-node",
    "trainer.nnodes": "--actor-num-nodes",
    "trainer.experiment_name trainer.project_name": "--name",
    "trainer.resume_mode": "--resume",
    "trainer.rollout_data_dir": "leave it out: every sample is in the run's folder, rollouts/",
    "trainer.save_freq": "--save-interval",
    "trainer.test_freq": "--eval-interval",
    "trainer.total_epochs": "--num-epoch",
    "trainer.total_training_steps": "--num-rollout",
    "trainer.val_before_train": "--skip-eval-before-train (for False)",
    "trainer.val_only": "--mode eval",
    **{f"critic.megatron.{name}": "--critic-" + name.replace("_", "-") for name in _PARALLEL},
}

# Names that several frameworks share.
COMMON: dict[str, str] = {
    "batch_size train_batch_size": _BATCH,
    "checkpoint": "--hf-checkpoint",
    "clip_range": "--eps-clip",
    "data train_data train_files": "--prompt-data",
    "device_map": "--device",
    "dtype": "--precision",
    "epochs": "--num-epoch",
    "eval_data": "--eval-prompt-data",
    "gpus num_gpus": "--actor-num-gpus-per-node and --rollout-num-gpus",
    "grad_clip": "--clip-grad",
    "group_size num_samples rollout_n": "--n-samples-per-prompt",
    "kl": "--use-kl-loss --kl-loss-coef (in the loss) or --kl-coef (in the reward)",
    "kl_beta kl_loss": "--use-kl-loss --kl-loss-coef",
    "max_response_length max_tokens response_length": "--rollout-max-response-len",
    "num_steps": "--num-rollout",
    "prompt_key": "--input-key",
    "reward": "--rm-type or --custom-rm-path",
    "reward_fn reward_function": "--custom-rm-path",
    "reward_model": "--rm-type reward_model with --rm-model",
    "tensor_parallel_size tp": "--tensor-model-parallel-size (trainers) or --rollout-num-gpus-per-engine (engines)",
    "warmup": "--lr-warmup-iters",
}

# slime's flags have a table of their own: `fusionrl/compat/slime/flags.md`.
TABLES: dict[str, dict[str, str]] = {
    owner: {name: cure for names, cure in table.items() for name in names.split()}
    for owner, table in (("TRL", TRL), ("verl", VERL), ("", COMMON))
}
_VERL_ROOTS = ("actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "reward_model", "trainer")
_SETTING = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=.*", re.DOTALL)

# Values of a flag that are called otherwise elsewhere: (field, values) -> what to write.
_VALUES: dict[tuple[str, str], str] = {
    ("advantage_estimator", "dapo"): "--algorithm dapo",
    ("advantage_estimator", "drgrpo"): "--advantage-estimator dr_grpo",
    ("advantage_estimator", "dpo"): "--algorithm dpo",
    ("advantage_estimator", "gae"): "--advantage-estimator ppo",
    ("advantage_estimator", "gpg"): "--policy-loss gpg",
    ("advantage_estimator", "group_norm"): "--advantage-estimator grpo",
    ("advantage_estimator", "grpo_passk"): "--advantage-estimator pass_at_k",
    ("advantage_estimator", "on_policy_distillation"): "--use-opd",
    ("advantage_estimator", "reinforce reinforce++"): "--advantage-estimator reinforce_plus_plus",
    ("advantage_estimator", "reinforce++_baseline"): "--advantage-estimator reinforce_plus_plus_baseline",
    ("algorithm", "drgrpo"): "--algorithm dr_grpo",
    ("algorithm", "gae"): "--algorithm ppo",
    ("algorithm", "reinforce reinforce++"): "--algorithm reinforce_plus_plus",
    ("algorithm", "reinforce++_baseline"): "--algorithm reinforce_plus_plus_baseline",
    ("algorithm", "sft"): "--mode sft",
    ("device", "gpu"): "--device cuda",
    ("kl_loss_type", "kl"): "--kl-loss-type k1",
    ("kl_loss_type", "mse"): "--kl-loss-type k2",
    ("kl_loss_type", "schulman"): "--kl-loss-type k3",
    ("lora_push", "merge"): "--lora-push merged",
    ("loss_aggregation", "seq_mean_token_mean"): "--loss-aggregation sequence_mean",
    ("loss_aggregation", "seq_mean_token_sum"): "--loss-aggregation constant --loss-length 1",
    ("loss_aggregation", "seq_mean_token_sum_norm"): "--loss-aggregation constant",
    ("loss_type", "bnpo"): "--loss-aggregation token_mean",
    ("loss_type", "cispo"): "--algorithm cispo",
    ("loss_type", "dapo"): "--algorithm dapo",
    ("loss_type", "dpo"): "--algorithm dpo",
    ("loss_type", "dr_grpo"): "--algorithm dr_grpo",
    ("loss_type", "grpo"): "--algorithm grpo",
    ("loss_type", "sapo"): "--policy-loss sapo",
    ("loss_type", "sft"): "--mode sft",
    ("lr_decay_style", "constant_with_warmup"): "--lr-decay-style constant with --lr-warmup-iters",
    ("mode", "dpo"): "--mode rl --algorithm dpo",
    ("mode", "evaluate evaluation test"): "--mode eval",
    ("mode", "generate"): "--mode eval, or --mode reject-sampling",
    ("mode", "grpo"): "--mode rl --algorithm grpo",
    ("mode", "ppo"): "--mode rl --algorithm ppo",
    ("mode", "rejection rejection_sampling"): "--mode reject-sampling",
    ("mode", "rlhf rlvr train"): "--mode rl",
    ("mode", "supervised"): "--mode sft",
    ("pipeline", "sync"): "--pipeline on-policy",
    ("policy_loss", "clip_covariance"): "--policy-loss clip_cov",
    ("policy_loss", "geo_mean"): "--policy-loss gmpo",
    ("policy_loss", "vanilla"): "--policy-loss ppo",
    ("rm_type", "accuracy"): "--rm-type math_verify (formulas) or --rm-type exact (text)",
    ("rm_type", "equal exact_match"): "--rm-type exact",
    ("rm_type", "gsm8k number"): "--rm-type last_number",
    ("rm_type", "math_dapo"): "--rm-type dapo",
    ("rm_type", "prime_math"): "--rm-type math",
    ("rm_type", "regex"): "--rm-type format with --rm-format-regex",
    ("rm_type", "remote"): "--rm-type remote_rm with --rm-url",
    ("rm_type", "rm"): "--rm-type reward_model with --rm-model",
    ("transformer_impl", "te"): "--transformer-impl transformer_engine",
    ("update_weight_transport", "tensor"): "--update-weight-transport ipc",
    **{
        (field, names): f"--{field.replace('_', '-')} {precision}"
        for field in ("precision", "rollout_dtype")
        for precision, names in (("bf16", "bfloat16 fp16 float16 half"), ("fp32", "float32 float full"))
    },
}
VALUES = {(field, value): cure for (field, values), cure in _VALUES.items() for value in values.split()}


def setting_of(token: str) -> str | None:
    """The name in a setting as verl's command line has them, `a.b.c=value` or `+a.b=value`; None for anything else."""
    match = _SETTING.fullmatch(token)
    return match[1] if match else None


def cure_for(name: str, flags: Collection[str] = ()) -> str | None:
    """Say what to write for another trainer's flag (`--learning-rate`) or setting (`data.train_batch_size`).

    A verl setting that no table has is answered by its last part, if that is one of our `flags` (fields) or in a
    table; those of a critic or a reward model have flags of their own. None for names that nothing answers.
    """
    plain = name.removeprefix("--").replace("-", "_")
    root = plain.partition(".")[0]
    owner, cure = next(((owner, table[plain]) for owner, table in TABLES.items() if plain in table), ("", None))
    if cure is None and root in _VERL_ROOTS:
        owner, cure = "verl", None if root in ("critic", "reward_model") else _verl_cure(plain, flags)
        if cure is None:
            return "verl's settings are not known here; `fusionrl flags` lists the flags"
    if cure is None:
        return None
    use = cure if cure.startswith("leave it out") else f"use {cure}"
    return f"{owner}'s name; {use}" if owner else use


def _verl_cure(setting: str, flags: Collection[str]) -> str | None:
    last = setting.rpartition(".")[2]
    cure = TABLES["TRL"].get(last) or TABLES[""].get(last)
    if setting.startswith(_ROLLOUT):  # engines have flags of their own: --precision or --seed are the trainers'
        is_rollouts = cure is not None and cure.startswith("--rollout-") and setting == _ROLLOUT + last
        return cure if is_rollouts else None
    return "--" + last.replace("_", "-") if last in flags and last != "name" else cure


def value_hint(field: str, value: str, choices: Iterable[str]) -> str:
    """`; did you mean …?` for a value that `field` does not take, by meaning or by spelling; else nothing."""
    plain = value.lower().replace("-", "_")
    if (field, plain) in VALUES:
        return f"; did you mean {VALUES[field, plain]}?"
    spelled = {choice.lower().replace("-", "_"): choice for choice in choices}
    close = closest(plain, spelled)
    return f"; did you mean --{field.replace('_', '-')} {spelled[close]}?" if close else ""
