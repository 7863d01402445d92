"""What is wrong with the flags of the algorithm."""

from __future__ import annotations

from fusionrl.config.config import Config
from fusionrl.config.groups import RolloutGroup
from fusionrl.config.model_shape import ModelShape

PRICED = ("reinforce_plus_plus", "ppo")  # estimators whose rewards are token by token, with --kl-coef as a price


def algorithm_errors(config: Config) -> list[str]:
    """Messages with flag, value and cure."""
    a, rollout, errors = config.algorithm, config.rollout, []
    if a.kl_loss_coef and not a.use_kl_loss:
        errors.append(f"--kl-loss-coef {a.kl_loss_coef} has no effect without --use-kl-loss; add it")
    if a.use_unbiased_kl and not a.use_kl_loss:
        errors.append("--use-unbiased-kl has no effect without --use-kl-loss; add it")
    if (a.loss_type == "custom_loss") != (a.custom_loss_function_path is not None):
        errors.append("--loss-type custom_loss and --custom-loss-function-path go together; give both")
    if a.kl_coef and a.advantage_estimator not in PRICED:
        errors.append(
            f"--kl-coef {a.kl_coef}: --advantage-estimator {a.advantage_estimator} has one reward a sample, none for"
            " tokens; use --use-kl-loss --kl-loss-coef, or the estimator " + " or ".join(PRICED)
        )
    samples = rollout.n_samples_per_prompt
    if a.advantage_estimator == "pass_at_k" and a.pass_k > samples:
        errors.append(f"--pass-k {a.pass_k} is over --n-samples-per-prompt {samples}: no group has so many answers")
    if a.advantage_estimator != "pass_at_k" and a.pass_k != 1:
        errors.append(f"--pass-k {a.pass_k} has no effect without --advantage-estimator pass_at_k; add it")
    if a.policy_loss == "dpo" and samples < 2:
        errors.append(
            f"--policy-loss dpo compares answers to one prompt; --n-samples-per-prompt {samples} must be over 1"
        )
    if a.policy_loss == "dpo" and a.loss_aggregation != "auto":
        errors.append(
            f"--loss-aggregation {a.loss_aggregation}: --policy-loss dpo has the mean over pairs; leave it out"
        )
    if a.loss_aggregation == "constant" and a.loss_length is None and rollout.rollout_max_response_len is None:
        errors.append("--loss-aggregation constant needs --loss-length or --rollout-max-response-len")
    return errors + _correction_errors(config)


def _correction_errors(config: Config) -> list[str]:
    a, errors = config.algorithm, []
    if not a.tis_clip_low < a.tis_clip:
        errors.append(f"--tis-clip-low {a.tis_clip_low} must be below --tis-clip {a.tis_clip}")
    if not a.rejection_low < a.rejection_high:
        errors.append(f"--rejection-low {a.rejection_low} must be below --rejection-high {a.rejection_high}")
    corrects = a.use_tis or a.rejection_level is not None or a.tis_veto is not None
    if corrects and a.use_rollout_logprobs:
        errors.append(
            "--use-rollout-logprobs takes the engine's log-probs as they are, --use-tis, --rejection-level and"
            " --tis-veto correct for them; leave one out"
        )
    if a.custom_tis_function_path is not None and corrects:
        errors.append("--custom-tis-function-path takes the place of --use-tis and rejection; leave one out")
    whole = {
        "--custom-tis-function-path": a.custom_tis_function_path,
        "--custom-pg-loss-reducer-function-path": a.custom_pg_loss_reducer_function_path,
    }
    for flag, path in whole.items():
        if path is not None and config.model.context_parallel_size > 1:
            errors.append(f"{flag} {path}: the function wants whole samples; --context-parallel-size must be 1")
    return errors


def routing_errors(config: Config, shape: ModelShape | None) -> list[str]:
    """Messages on routing replay, for a model of `shape` (None: not known)."""
    a, errors = config.algorithm, []
    engine = a.use_rollout_routing_replay
    if not (engine or a.use_routing_replay):
        return []
    flag = "--use-rollout-routing-replay" if engine else "--use-routing-replay"
    if config.run.mode != "rl":
        errors.append(f"{flag} has no effect in --mode {config.run.mode}; leave it out")
    if shape is not None and shape.moe is None:
        errors.append(f"{flag}: the model of --hf-checkpoint has no experts to route to; leave the flag out")
    makes_samples = (
        config.rollout.custom_generate_function_path,
        config.reward.custom_convert_samples_to_train_data_path,
        config.run.load_debug_rollout_data,
    )
    own_rollout = config.rollout.rollout_function_path != RolloutGroup().rollout_function_path
    if engine and not any(makes_samples) and not own_rollout:
        errors.append(
            f"{flag}: the default rollout does not learn which experts the engine chose (SGLang's router drops the"
            " request for them); set rollout_routed_experts in --custom-generate-function-path, or take"
            " --use-routing-replay"
        )
    passed = config.passthrough.transformer
    for name, value in (("moe_router_fusion", True), ("overlap_moe_expert_parallel_comm", True)):
        if passed.get(name) == value:
            errors.append(f"{flag}: --{name.replace('_', '-')} leaves no place for it; leave one out")
    if "sinkhorn" in passed.get("moe_router_load_balancing_type", ""):
        errors.append(f"{flag}: --moe-router-load-balancing-type sinkhorn chooses by all tokens; leave one out")
    if passed.get("cuda_graph_impl", "none") != "none":
        errors.append(f"{flag}: a CUDA graph (--cuda-graph-impl) keeps the choice it was made with; leave one out")
    return errors
