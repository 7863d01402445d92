"""Flags that were given and do nothing in this run: they act in another mode, or with other flags.

`EFFECTS` says of each field in which runs it is read. It was made by reading what reads the field; a user's own
function may read any flag, so where one takes the place of what reads it, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusionrl.algorithms.estimators import ACCURACY, ESTIMATORS, Role, names_where, readers_of
from fusionrl.algorithms.losses import losses_that_read
from fusionrl.config.config import Config
from fusionrl.config.groups import CriticGroup, DataGroup, PipelineGroup, PrmGroup, RolloutGroup, WeightsGroup
from fusionrl.config.hooks import SIGNATURES, flag_of
from fusionrl.config.pipelines import AVAILABLE, IN_TURN
from fusionrl.config.presets import NONZERO_STD, PRESETS
from fusionrl.config.run_parts import (
    changes_weights,
    estimator_of,
    evaluates,
    generates,
    has_policy_loss,
    needs_reference,
    policy_loss_name,
    saves,
    uses_engines,
    uses_trainers,
    validates,
)
from fusionrl.plan.pipeline_knobs import is_streamed


@dataclass(frozen=True)
class Scope:
    """The settings in which a field acts.

    holds    whether it does in a run
    missing  what a run lacks where it does not: of the mode ("there are no trainers") or, with `of_flags`, of the
             other flags ("without --use-kl-loss")
    """

    holds: Callable[[Config], bool]
    missing: str
    of_flags: bool = False


def _only_with(holds: Callable[[Config], bool], missing: str) -> Scope:
    return Scope(holds, missing, of_flags=True)


# ------------------------------------------------------------------------------------------------ by mode
TRAINERS = Scope(uses_trainers, "it has no trainers")
ENGINES = Scope(uses_engines, "it has no engines")
PUSHES = Scope(lambda c: uses_trainers(c) and uses_engines(c), "no weights are pushed")
TRAINS = Scope(changes_weights, "no weights are trained")
POLICY = Scope(has_policy_loss, "it has no policy loss")
GENERATES = Scope(generates, "nothing is generated to train on")
EVALUATES = Scope(evaluates, "engines evaluate nothing")
TESTS = Scope(lambda c: evaluates(c) or validates(c), "nothing is evaluated")
TESTS_BETWEEN = Scope(
    lambda c: c.run.mode != "eval" and (evaluates(c) or validates(c)), "nothing is evaluated between steps"
)
STEPS = Scope(lambda c: c.run.mode != "eval", "it has no steps")
SAVES = Scope(saves, "nothing is saved")
PROMPTS = Scope(lambda c: c.run.mode != "eval" and not c.run.load_debug_rollout_data, "no prompt data is read")
ROLLOUT_FUNCTION = Scope(lambda c: not c.run.load_debug_rollout_data, "rollouts are read from files")
SCORES = Scope(lambda c: c.run.mode in ("rl", "reject-sampling"), "nothing is scored to train on or to choose from")
RL = Scope(lambda c: c.run.mode == "rl", "no policy is trained by rewards")
SFT = Scope(lambda c: c.run.mode == "sft", "it has no conversations to train on")
RENDERS = Scope(
    lambda c: uses_engines(c),
    "conversations always go through the chat template, and text prompts are trained as plain text with their response"
    " (for the template, give messages)",
)
NOT_SFT = Scope(lambda c: c.run.mode != "sft", "nothing is sampled")
REJECTS = Scope(lambda c: c.run.mode == "reject-sampling", "no samples are chosen and written")
PRESET = Scope(
    lambda c: c.run.mode == "rl" or (c.run.mode == "reject-sampling" and _filters(c)),
    "no policy is trained by rewards",
)


STREAMED = Scope(
    is_streamed,
    f"without a --pipeline that runs ahead ({', '.join(n for n in AVAILABLE if n != IN_TURN)})",
    of_flags=True,
)


# ------------------------------------------------------------------------------------------------ with other flags
def _filters(config: Config) -> bool:
    return "dynamic_sampling_filter_path" in PRESETS.get(str(config.algorithm.algorithm), {})


def policy_loss(config: Config) -> str | None:
    """The name of the policy loss in use; None where a function of the user's takes its place, or may read flags."""
    a = config.algorithm
    if a.custom_policy_loss_path is not None or a.loss_type == "custom_loss":
        return None
    return policy_loss_name(a)


def _of_losses(field: str) -> Scope:
    names = losses_that_read(field)
    return _only_with(lambda c: policy_loss(c) in (None, *names), f"without --policy-loss {' or '.join(names)}")


def _moves(config: Config) -> bool:
    """Return whether the policy may have moved between the rollout and the loss: after the first step it has."""
    rollout, train = config.rollout, config.train
    total = (rollout.rollout_batch_size or 0) * rollout.n_samples_per_prompt
    if is_streamed(config):
        return True
    is_one_step = train.num_steps_per_rollout in (None, 1) and train.global_batch_size in (None, total)
    return policy_loss(config) is None or config.algorithm.use_rollout_logprobs or not is_one_step


def _may_be_agent(config: Config) -> bool:
    custom_paths = (config.rollout.rollout_function_path, config.data.data_source_path)
    plain = (RolloutGroup().rollout_function_path, DataGroup().data_source_path)
    return bool(config.rollout.custom_generate_function_path or config.eval.eval_config or custom_paths != plain)


def _corrects_itself(config: Config) -> bool:
    return config.algorithm.custom_tis_function_path is not None


def _with_role(role: Role) -> tuple[str, ...]:
    return names_where(lambda estimator: estimator.role == role)


def _of_estimators(*names: str) -> Scope:
    *first, last = names
    listed = f"{', '.join(first)} or {last}" if first else last
    return _only_with(lambda c: c.algorithm.advantage_estimator in names, f"without --advantage-estimator {listed}")


MOVES = _only_with(_moves, "with one optimizer step a rollout (its ratio to the policy that sampled is 1)")
NOT_DPO = _only_with(lambda c: c.algorithm.policy_loss != "dpo", "with --policy-loss dpo")
KL_LOSS = _only_with(lambda c: c.algorithm.use_kl_loss, "without --use-kl-loss")
REFERENCE = _only_with(
    lambda c: needs_reference(c.algorithm), "without --use-kl-loss, --kl-coef or --policy-loss dpo (no reference model)"
)
ESTIMATOR = _only_with(
    lambda c: c.reward.custom_reward_post_process_path is None, "with --custom-reward-post-process-path"
)
DEVIATION = _of_estimators(*names_where(lambda estimator: estimator.plain_group is not None))
OF_SAMPLES = _only_with(
    lambda c: estimator_of(c.algorithm).group is not None,
    f"with --advantage-estimator {' or '.join(names_where(lambda estimator: estimator.group is None))}",
)
WHITENS = _only_with(
    lambda c: not estimator_of(c.algorithm).is_whitened or c.algorithm.normalize_advantages,
    "with an --advantage-estimator that always whitens",
)
AGGREGATED = _only_with(
    lambda c: c.run.mode != "rl" or (c.algorithm.loss_aggregation == "auto" and c.algorithm.policy_loss != "dpo"),
    "with --loss-aggregation or --policy-loss dpo",
)
AGENT = _only_with(_may_be_agent, "without --custom-generate-function-path")
PARTIAL = _only_with(lambda c: c.rollout.partial_rollout, "without --partial-rollout")
HAS_SETS = _only_with(lambda c: c.eval.has_sets, "without --eval-prompt-data or --eval-config")
IS_DUE = _only_with(
    lambda c: c.run.mode == "eval" or c.eval.eval_interval is not None or not c.eval.skip_eval_before_train,
    "with --skip-eval-before-train and without --eval-interval",
)
SAVING = _only_with(lambda c: not c.checkpoint.no_save, "with --no-save")
CHECKS_SAVES = _only_with(lambda c: not c.checkpoint.no_save or c.run.resume, "with --no-save")
DECAY = _only_with(lambda c: c.train.lr_decay_style != "constant", "with --lr-decay-style constant")
WARM_UP = _only_with(
    lambda c: (
        max(c.train.lr_warmup_iters, c.critic.critic_lr_warmup_iters or 0, c.prm.prm_lr_warmup_iters or 0) > 0
        or bool(c.train.lr_warmup_fraction)
    ),
    "without --lr-warmup-iters",
)
EPOCHS = _only_with(lambda c: c.run.num_rollout is None, "with --num-rollout")
COLOCATED = _only_with(lambda c: c.cluster.colocate, "without --colocate")
OFFLOADS = _only_with(lambda c: c.cluster.offload_train != "never", "with --offload-train never")
PROCESSES = _only_with(lambda c: not c.run.in_process, "with --in-process")
LOCAL_RAY = _only_with(lambda c: c.cluster.ray_address is None, "with --ray-address")
OTHER_RAY = _only_with(lambda c: c.cluster.ray_address is not None, "without --ray-address")
FAULT_TOLERANCE = _only_with(lambda c: c.rollout.use_fault_tolerance, "without --use-fault-tolerance")
FILTERS = _only_with(
    lambda c: c.rollout.dynamic_sampling_filter_path not in (None, NONZERO_STD),
    f"without --dynamic-sampling-filter-path {ACCURACY}",
)
REWARD_MODEL = _only_with(lambda c: c.reward.rm_model is not None, "without --rm-model")
OVERLONG = _only_with(lambda c: c.reward.overlong_buffer_len is not None, "without --overlong-buffer-len")
PROFILED = _only_with(lambda c: bool(c.run.profile_steps), "without --profile-steps")
ON_GPUS = _only_with(lambda c: c.cluster.device != "cpu", "with --device cpu")
ON_A_CPU = _only_with(lambda c: c.cluster.device != "cuda", "with --device cuda")
PRICE = _only_with(lambda c: c.algorithm.kl_coef > 0, "without --kl-coef")
TIS = _only_with(lambda c: c.algorithm.use_tis or _corrects_itself(c), "without --use-tis")
REJECTION = _only_with(
    lambda c: c.algorithm.rejection_level is not None or _corrects_itself(c), "without --rejection-level"
)
OPSM = _only_with(lambda c: c.algorithm.use_opsm, "without --use-opsm")
DISTILLS = _only_with(lambda c: c.algorithm.use_opd, "without --use-opd")
TEACHER_ENGINES = _only_with(lambda c: c.algorithm.opd_type == "sglang", "with --opd-type megatron")
CONSTANT = _only_with(lambda c: c.algorithm.loss_aggregation == "constant", "without --loss-aggregation constant")
VERIFIES = _only_with(lambda c: c.weights.verify_weights != "never", "with --verify-weights never")

_ROWS: tuple[tuple[tuple[Scope, ...], tuple[str, ...]], ...] = (
    ((RL,), ("pipeline",)),
    ((TRAINERS,), ("seed",)),
    ((STEPS,), ("num_rollout", "save_debug_rollout_data", "rollout_batch_size")),
    ((STEPS, EPOCHS), ("num_epoch",)),
    ((STEPS,), ("profile_steps",)),
    ((STEPS, PROFILED), ("profile_ranks", "profile_tool", "profile_continuous")),
    ((LOCAL_RAY,), ("dashboard",)),
    ((OTHER_RAY,), ("allow_open_ray",)),
    # ---- cluster and model
    (
        (TRAINERS,),
        (
            *("actor_num_nodes", "actor_num_gpus_per_node", "offload_train", "distributed_timeout_minutes"),
            *(
                "train_num_threads",
                "peak_tflops",
                "debug_random_weights",
                "megatron_checkpoint",
                "custom_model_provider_path",
                "custom_spec_path",
            ),
            *("transformer_impl", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
            *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("micro_batch_size", "max_tokens_per_gpu", "custom_megatron_init_path", "log_probs_chunk_size"),
            "share_prompts",
            "save_hf",
        ),
    ),
    ((TRAINERS, OFFLOADS, ON_A_CPU), ("offload_folder",)),
    ((RL, STREAMED), tuple(name for name in PipelineGroup.model_fields if name != "sample_timeout")),
    ((ENGINES,), ("sample_timeout",)),
    ((PROCESSES,), ("stall_warn_s", "stall_timeout_s")),
    ((PROCESSES, ON_GPUS), ("numa_affinity",)),
    ((PUSHES,), ("colocate",)),
    ((PUSHES, COLOCATED, ON_GPUS), ("offload_rollout",)),
    ((POLICY, REFERENCE), ("ref_load",)),
    # ---- data, rollout and rewards
    ((PROMPTS,), ("prompt_data", "prompt_data_weights", "rollout_shuffle", "data_source_path", "buffer_filter_path")),
    ((PROMPTS,), ("rollout_sample_filter_path", "rollout_all_samples_process_path")),
    ((SFT,), ("loss_mask_type",)),
    ((RENDERS,), ("apply_chat_template",)),
    ((ROLLOUT_FUNCTION,), ("rollout_function_path",)),
    (
        (ENGINES,),
        (
            *("rollout_max_prompt_len", "rollout_num_gpus", "rollout_num_gpus_per_engine", "engine_group"),
            *("rollout_dtype", "custom_generate_function_path", "rollout_sample_hook_path", "rollout_top_p"),
            *("rollout_top_k", "rollout_min_response_len", "rollout_max_context_len", "rollout_stop"),
            *("rollout_stop_token_ids", "rollout_ignore_eos", "rollout_skip_special_tokens"),
            *("sglang_server_concurrency", "router_api_key", "stream_responses", "engine_start_timeout_s"),
            *("use_fault_tolerance", "rm_type", "rm_format_regex", "rm_url", "rm_model", "custom_rm_path", "group_rm"),
            *("reward_timeout_s", "reward_failure_value", "reward_num_processes", "pause_generation_mode"),
            *("allow_weak_sandbox", "rollout_external_engine_addrs"),
        ),
    ),
    ((ENGINES, ON_A_CPU), ("engine_num_threads",)),
    (
        (ENGINES, FAULT_TOLERANCE),
        ("rollout_health_check_interval", "rollout_health_check_timeout", "rollout_health_check_first_wait"),
    ),
    ((ENGINES, REWARD_MODEL), ("rm_input", "rm_num_gpus", "rm_num_gpus_per_engine", "rm_server_args")),
    ((ENGINES, AGENT), ("tools_path", "tool_call_parser", "max_turns", "max_tool_response_len", "tool_timeout_s")),
    ((ENGINES, AGENT), ("agent_path", "agent_timeout_s", "agent_free_sampling")),
    ((NOT_SFT,), ("rollout_temperature", "rollout_max_response_len", "reward_key")),
    ((GENERATES,), ("partial_rollout", "over_sampling_batch_size", "dynamic_sampling_filter_path")),
    ((GENERATES, FILTERS), ("accuracy_lower_bound", "accuracy_upper_bound")),
    ((GENERATES, PARTIAL), ("mask_offpolicy_in_partial_rollout",)),
    ((SCORES,), ("log_samples",)),
    ((TRAINS, RL), ("save_token_values",)),
    ((SCORES,), ("n_samples_per_prompt", "custom_rollout_log_function_path", "custom_reward_post_process_path")),
    ((RL,), ("overlong_buffer_len", "length_penalty_coef")),
    ((RL, OVERLONG), ("overlong_penalty_factor",)),
    ((TRAINS, RL), ("custom_convert_samples_to_train_data_path",)),
    # ---- algorithm
    ((PRESET,), ("algorithm",)),
    ((RL,), ("advantage_estimator", "loss_type", "custom_loss_function_path")),
    (
        (POLICY,),
        (
            *("kl_coef", "custom_policy_loss_path", "custom_pg_loss_reducer_function_path", "use_tis", "tis_veto"),
            *("rejection_level", "custom_tis_function_path", "use_opsm", "use_kl_loss", "entropy_coef"),
            *("use_rollout_logprobs", "custom_advantage_function_path", "rollout_data_postprocess_path"),
            "custom_megatron_before_log_prob_hook_path",
        ),
    ),
    (
        (TRAINS, RL),
        (*("policy_loss", "loss_aggregation", "use_routing_replay", "use_rollout_routing_replay", "use_opd"),),
    ),
    ((TRAINS, RL, CONSTANT), ("loss_length",)),
    ((TRAINS, RL, DISTILLS), ("opd_type", "opd_kl_coef", "opd_teacher_load")),
    (
        (TRAINS, RL, DISTILLS, TEACHER_ENGINES),
        ("opd_teacher_num_gpus", "opd_teacher_num_gpus_per_engine", "opd_teacher_server_args"),
    ),
    ((TRAINS, RL, _of_estimators(*_with_role("critic"))), tuple(CriticGroup.model_fields)),
    ((TRAINS, RL, _of_estimators(*_with_role("prm"))), tuple(PrmGroup.model_fields)),
    ((POLICY,), ("gamma", "lambd", "bootstrap_truncated")),
    ((POLICY, ESTIMATOR), ("pass_k",)),
    ((POLICY, PRICE), ("kl_coef_type",)),
    ((POLICY, TIS), ("tis_clip", "tis_clip_low", "tis_level", "tis_mode")),
    ((POLICY, REJECTION), ("rejection_low", "rejection_high")),
    ((POLICY, OPSM), ("opsm_delta",)),
    ((POLICY, _of_losses("dpo_beta")), ("dpo_beta", "dpo_label_smoothing")),
    ((POLICY, KL_LOSS), ("kl_loss_coef", "kl_loss_type", "use_unbiased_kl")),
    ((POLICY, WHITENS), ("normalize_advantages",)),
    ((POLICY, ESTIMATOR, NOT_DPO, DEVIATION), ("disable_grpo_std_normalization",)),
    ((POLICY, ESTIMATOR, NOT_DPO, OF_SAMPLES), ("disable_rewards_normalization",)),
    ((POLICY, _of_losses("eps_clip"), MOVES), ("eps_clip", "eps_clip_high")),
    ((POLICY, _of_losses("eps_clip_c"), MOVES), ("eps_clip_c",)),
    ((POLICY, _of_losses("sapo_tau_pos"), MOVES), ("sapo_tau_pos", "sapo_tau_neg")),
    ((POLICY, _of_losses("clip_cov_low")), ("clip_cov_fraction", "clip_cov_low", "clip_cov_high")),
    ((POLICY, _of_losses("kl_cov_coef"), MOVES), ("kl_cov_fraction", "kl_cov_coef")),
    ((TRAINS, AGGREGATED), ("calculate_per_token_loss",)),
    # ---- training
    (
        (TRAINS,),
        (
            *(
                "global_batch_size",
                "num_steps_per_rollout",
                "lr",
                "lr_decay_style",
                "lr_warmup_iters",
                "lr_warmup_fraction",
            ),
            *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "max_skipped_steps"),
            "custom_megatron_before_train_step_hook_path",
        ),
    ),
    ((TRAINS, DECAY), ("min_lr", "lr_decay_iters")),
    ((TRAINS, WARM_UP), ("lr_warmup_init",)),
    # ---- evaluation
    ((TESTS, IS_DUE), ("eval_prompt_data", "eval_config")),
    ((TESTS, HAS_SETS), ("eval_input_key", "eval_label_key")),
    ((TESTS_BETWEEN, HAS_SETS), ("eval_interval", "skip_eval_before_train")),
    (
        (EVALUATES, HAS_SETS),
        (
            *("eval_num_gpus", "eval_function_path", "custom_eval_rollout_log_function_path", "eval_reward_key"),
            *("n_samples_per_eval_prompt", "eval_temperature", "eval_top_p", "eval_top_k", "eval_max_response_len"),
        ),
    ),
    # ---- weight push and checkpoints
    (
        (PUSHES,),
        tuple(name for name in WeightsGroup.model_fields if name not in ("pause_generation_mode", "verify_tolerance")),
    ),
    ((PUSHES, VERIFIES), ("verify_tolerance",)),
    ((SAVES, SAVING), ("save_interval", "keep_checkpoints", "keep_best")),
    ((SAVES, TRAINS, SAVING), ("async_save",)),
    ((SAVES, CHECKS_SAVES), ("verify_checkpoints",)),
    ((REJECTS,), ("reject_sampling_output", "reject_sampling_threshold", "reject_sampling_per_prompt")),
)

# Fields that only some estimators read.
_OF_ESTIMATORS = {
    field: (_of_estimators(*readers_of(field)),) for estimator in ESTIMATORS.values() for field in estimator.reads
}
EFFECTS: dict[str, tuple[Scope, ...]] = {
    field: (*scopes, *_OF_ESTIMATORS.get(field, ())) for scopes, fields in _ROWS for field in fields
}

# A rollout function of the user's own may read these in any mode.
READ_BY_ROLLOUTS = {*DataGroup.model_fields, *RolloutGroup.model_fields}

# Fields passed through to SGLang, its router and Megatron-core: by the name of their part in `Config.passthrough`.
PASSED: dict[str, tuple[str, Scope]] = {
    "sglang": ("--sglang-", ENGINES),
    "router": ("--router-", ENGINES),
    "transformer": ("--", TRAINERS),
    "optimizer": ("--", TRAINS),
    "ddp": ("--", TRAINS),
}


def effect_warnings(config: Config) -> list[str]:
    """A line for each reason why flags that were given (not those of a preset) do nothing, and hooks are not called."""
    lines: dict[str, list[str]] = {}
    has_own_rollout = config.rollout.rollout_function_path != RolloutGroup().rollout_function_path
    for field in config.given():
        if has_own_rollout and field in READ_BY_ROLLOUTS and field not in SIGNATURES:
            continue
        missing = next((scope for scope in EFFECTS.get(field, ()) if not scope.holds(config)), None)
        if missing is not None:
            lines.setdefault(_reason(missing, config, is_hook=field in SIGNATURES), []).append(flag_of(field))
    for part, (prefix, scope) in PASSED.items():
        passed = getattr(config.passthrough, part)
        if passed and not scope.holds(config):
            flags = lines.setdefault(_reason(scope, config, is_hook=False), [])
            flags += [name for name in (prefix + name.replace("_", "-") for name in passed) if name not in flags]
    return [f"{reason}: {', '.join(flags)}" for reason, flags in lines.items()]


def _reason(scope: Scope, config: Config, *, is_hook: bool) -> str:
    effect = "not called" if is_hook else "no effect"
    return f"{effect} {scope.missing}" if scope.of_flags else f"{effect} in {_run(config)}, where {scope.missing}"


def _run(config: Config) -> str:
    """The flags that decide which parts a run has: `--mode sft`, `--mode rl --debug-rollout-only`."""
    switches = {
        "--debug-rollout-only": config.run.debug_rollout_only,
        "--debug-train-only": config.run.debug_train_only,
        "--no-trainer": config.reject_sampling.no_trainer,
        "--loss-type sft_loss": config.run.mode == "rl" and config.algorithm.loss_type == "sft_loss",
    }
    return " ".join([f"--mode {config.run.mode}", *(flag for flag, is_on in switches.items() if is_on)])
