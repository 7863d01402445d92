"""Errors of the algorithm's flags."""

from fusionrl.algorithms.estimators import names_where, readers_of
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of, has_own_rollout
from fusionrl.models.shape import ModelShape

# Estimators that measure a sample against its siblings alone: a single sample gets 0.
OF_GROUPS = names_where(lambda estimator: estimator.compares_siblings and estimator.role is None)


def algorithm_errors(config: Config) -> list[str]:
    """Messages with flag, value and cure."""
    a, reward, samples, errors = config.algorithm, config.reward, config.rollout.n_samples_per_prompt, []
    if (a.loss_type == "custom_loss") != (a.custom_loss_function_path is not None):
        errors.append("--loss-type custom_loss and --custom-loss-function-path go together; give both")
    if a.loss_type == "custom_loss" and config.run.mode != "rl":
        errors.append(f"--loss-type custom_loss belongs to --mode rl, not to {config.run.mode}")
    if a.advantage_estimator in readers_of("pass_k"):
        if a.pass_k > samples:
            errors.append(f"--pass-k {a.pass_k} is over --n-samples-per-prompt {samples}; lower it")
        if reward.length_penalty_coef or reward.overlong_buffer_len:
            cure = "leave out --length-penalty-coef and --overlong-buffer-len"
            errors.append(f"--advantage-estimator {a.advantage_estimator} counts right and wrong answers; {cure}")
    if a.loss_aggregation == "constant" and a.loss_length is None and config.rollout.rollout_max_response_len is None:
        errors.append("--loss-aggregation constant needs --loss-length or --rollout-max-response-len")
    if a.custom_policy_loss_path is not None and a.policy_loss != "auto":
        errors.append(f"--policy-loss {a.policy_loss} and --custom-policy-loss-path exclude each other; leave one out")
    return errors + (_dpo_errors(config) if a.policy_loss == "dpo" else []) + _correction_errors(config)


def _dpo_errors(config: Config) -> list[str]:
    a, samples = config.algorithm, config.rollout.n_samples_per_prompt
    conflicts = {
        f"--advantage-estimator {a.advantage_estimator}": estimator_of(a).role == "prm",
        f"--loss-aggregation {a.loss_aggregation}": a.loss_aggregation != "auto",
        "--use-opd": a.use_opd,
        "--normalize-advantages": a.normalize_advantages,
        "--custom-advantage-function-path": config.train.custom_advantage_function_path,
        f"--loss-type {a.loss_type}": a.loss_type != "policy_loss",
    }
    errors = [f"{flag}: --policy-loss dpo has no use for it; leave one out" for flag, on in conflicts.items() if on]
    if samples < 2:
        errors.append(f"--policy-loss dpo compares answers to one prompt; raise --n-samples-per-prompt {samples}")
    return errors


def algorithm_warnings(config: Config) -> list[str]:
    """Return a line for each setting that is allowed but probably not meant."""
    a, rollout, reward, warnings = config.algorithm, config.rollout, config.reward, []
    if config.run.mode == "rl" and a.use_kl_loss and not a.kl_loss_coef and a.loss_type == "policy_loss":
        warnings.append("--use-kl-loss without --kl-loss-coef: train/kl_loss is only measured; give the coefficient")
    may_be_otherwise = (  # a function in one of these may make groups, rewards or advantages itself
        a.use_opd or a.disable_rewards_normalization or a.loss_type != "policy_loss",
        has_own_rollout(config),
        rollout.custom_generate_function_path,
        reward.custom_reward_post_process_path,
        reward.custom_convert_samples_to_train_data_path,
        config.train.custom_advantage_function_path,
        config.train.rollout_data_postprocess_path,
    )
    alone = config.run.mode == "rl" and rollout.n_samples_per_prompt == 1 and a.advantage_estimator in OF_GROUPS
    if alone and not any(may_be_otherwise):
        warnings.append(
            f"--n-samples-per-prompt 1 with --advantage-estimator {a.advantage_estimator}: an answer alone has the"
            " advantage 0; sample at least 2, or take reinforce_plus_plus, remax or ppo"
        )
    return warnings


def _correction_errors(config: Config) -> list[str]:
    a, errors = config.algorithm, []
    if not a.tis_clip_low < a.tis_clip:
        errors.append(f"--tis-clip-low {a.tis_clip_low} must be below --tis-clip {a.tis_clip}")
    if not a.rejection_low < a.rejection_high:
        errors.append(f"--rejection-low {a.rejection_low} must be below --rejection-high {a.rejection_high}")
    corrects = a.use_tis or a.rejection_level is not None or a.tis_veto is not None
    if corrects and a.use_rollout_logprobs:
        errors.append("--use-rollout-logprobs excludes --use-tis, --rejection-level and --tis-veto; leave one out")
    if a.custom_tis_function_path is not None and (a.rejection_level is not None or a.tis_veto is not None):
        errors.append("--custom-tis-function-path replaces --rejection-level and --tis-veto; leave one out")
    return errors


def routing_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """Messages on routing replay, for a model of `shape` (None: not known)."""
    a, errors = config.algorithm, []
    engine = a.use_rollout_routing_replay
    if not (engine or a.use_routing_replay):
        return []
    flag = "--use-rollout-routing-replay" if engine else "--use-routing-replay"
    if shape is not None and not shape.num_experts:
        errors.append(f"{flag}: the model of --hf-checkpoint has no experts to route to; leave the flag out")
    passed = config.passthrough.transformer
    for name, value in (("moe_router_fusion", True), ("overlap_moe_expert_parallel_comm", True)):
        if passed.get(name) == value:
            errors.append(f"{flag}: --{name.replace('_', '-')} leaves no place for it; leave one out")
    if "sinkhorn" in passed.get("moe_router_load_balancing_type", ""):
        errors.append(f"{flag}: --moe-router-load-balancing-type sinkhorn chooses by all tokens; leave one out")
    if passed.get("cuda_graph_impl", "none") != "none":
        errors.append(f"{flag}: a CUDA graph (--cuda-graph-impl) keeps the choice it was made with; leave one out")
    return errors
