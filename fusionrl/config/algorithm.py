"""Flags of advantages and losses, and of the models trained next to the policy. --algorithm sets several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fusionrl.algorithms.estimators import ESTIMATORS, LOSSES, PRESETS
from fusionrl.config import scopes
from fusionrl.config.scopes import Group, JsonObject, acting, of_policy, of_rl, of_rl_training

# The tables decide what these flags take. A type checker cannot read a Literal of a table.
if TYPE_CHECKING:
    AlgorithmName = str
    EstimatorName = str
    PolicyLossName = str
else:
    AlgorithmName = Literal[tuple(PRESETS)]
    EstimatorName = Literal[tuple(ESTIMATORS)]
    PolicyLossName = Literal[("auto", *LOSSES)]

only_of_rl = acting(scopes.TRAINS, scopes.needed(scopes.RL))
of_clip = acting(scopes.POLICY, scopes.of_losses("eps_clip"), scopes.MOVES)
of_sapo = acting(scopes.POLICY, scopes.of_losses("sapo_tau_pos"), scopes.MOVES)
of_clip_cov = acting(scopes.POLICY, scopes.of_losses("clip_cov_low"))
of_kl_cov = acting(scopes.POLICY, scopes.of_losses("kl_cov_coef"), scopes.MOVES)
of_dpo = acting(scopes.POLICY, scopes.DPO)
of_tis = acting(scopes.POLICY, scopes.TIS)
of_rejection = acting(scopes.POLICY, scopes.REJECTION)
of_kl_loss = acting(scopes.POLICY, scopes.NEEDS_KL_LOSS)
of_distillation = acting(scopes.TRAINS, scopes.RL, scopes.DISTILLS)
of_teacher_engines = acting(scopes.TRAINS, scopes.RL, scopes.DISTILLS, scopes.TEACHER_ENGINES)
of_critic = acting(scopes.TRAINS, scopes.RL, scopes.CRITIC)
of_prm = acting(scopes.TRAINS, scopes.RL, scopes.PRM)


class AlgorithmGroup(Group):
    """Algorithm"""

    algorithm: AlgorithmName | None = acting(scopes.PRESET)(
        None, "Flags of a published algorithm (docs/guides/algorithms.md); any flag you also pass overrides the preset."
    )
    advantage_estimator: EstimatorName = of_rl(
        "grpo", "Advantage estimator (docs/guides/algorithms.md); gspo and cispo are grpo with their own policy loss."
    )
    pass_k: int = acting(scopes.POLICY, scopes.ESTIMATOR, scopes.read_by_estimators("pass_k"))(
        1, "Answers that count as one try, for --advantage-estimator pass_at_k.", ge=1
    )
    gamma: float = acting(scopes.POLICY, scopes.read_by_estimators("gamma"))(
        1.0, "Discount of token rewards (reinforce_plus_plus, ppo, prime).", ge=0, le=1
    )
    lambd: float = acting(scopes.POLICY, scopes.read_by_estimators("lambd"))(1.0, "Lambda of GAE (ppo).", ge=0, le=1)
    bootstrap_truncated: bool = acting(scopes.POLICY, scopes.read_by_estimators("bootstrap_truncated"))(
        False, "GAE (ppo): bootstrap a response cut at its length limit from the critic's last value, not from 0."
    )
    normalize_advantages: bool = acting(scopes.POLICY, scopes.WHITENS)(
        False, "Whiten advantages over all tokens of a rollout; reinforce_plus_plus and prime always do."
    )
    kl_coef: float = acting(scopes.POLICY, scopes.read_by_estimators("kl_coef"))(
        0.0, "Coefficient of the KL penalty to the reference in each token's reward (reinforce_plus_plus, ppo).", ge=0
    )
    kl_coef_type: Literal["k1", "k2", "k3", "low_var_kl"] = acting(
        scopes.POLICY, scopes.PRICE, scopes.read_by_estimators("kl_coef_type")
    )("k1", "Estimator of that KL; k2 and k3 are never negative, and also penalise a token that became less likely.")
    policy_loss: PolicyLossName = of_rl_training(
        "auto", "Policy loss (docs/guides/algorithms.md); auto: gspo or cispo for those estimators, otherwise ppo."
    )
    custom_policy_loss_path: str | None = of_policy(
        None, "Function that computes the policy loss of each token, in place of --policy-loss."
    )
    loss_aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = of_rl_training(
        "auto",
        "Aggregation of token losses: mean over all tokens, mean over samples of token means, or mean over"
        " samples of token sums / --loss-length. auto: follow --calculate-per-token-loss.",
    )
    loss_length: int | None = acting(scopes.TRAINS, scopes.RL, scopes.CONSTANT)(
        None, "Length that --loss-aggregation constant divides by. Default: --rollout-max-response-len.", ge=1
    )
    custom_pg_loss_reducer_function_path: str | None = of_policy(
        None, "Function that returns the function that reduces a micro-batch's policy losses to a number."
    )
    disable_grpo_std_normalization: bool = acting(scopes.POLICY, scopes.ESTIMATOR, scopes.NOT_DPO, scopes.DEVIATION)(
        False, "Do not divide advantages by the group's standard deviation."
    )
    disable_rewards_normalization: bool = acting(scopes.POLICY, scopes.ESTIMATOR, scopes.NOT_DPO, scopes.OF_SAMPLES)(
        False, "Use raw rewards as advantages."
    )
    eps_clip: float = of_clip(0.2, "Lower clip range of the policy ratio.", gt=0)
    eps_clip_high: float | None = of_clip(None, "Upper clip range. Default: --eps-clip.", gt=0)
    eps_clip_c: float | None = acting(scopes.POLICY, scopes.of_losses("eps_clip_c"), scopes.MOVES)(
        None, "Dual clip: bound the loss of a negative advantage by this multiple of its size.", gt=1
    )
    sapo_tau_pos: float = of_sapo(1.0, "SAPO's temperature for positive advantages.", gt=0)
    sapo_tau_neg: float = of_sapo(1.05, "SAPO's temperature for zero and negative advantages.", gt=0)
    clip_cov_fraction: float = of_clip_cov(2e-4, "Share of tokens whose gradient clip_cov stops.", gt=0, le=1)
    clip_cov_low: float = of_clip_cov(1.0, "Lower bound on the covariance of such a token.")
    clip_cov_high: float = of_clip_cov(5.0, "Upper bound on the covariance of such a token.")
    kl_cov_fraction: float = of_kl_cov(2e-4, "Share of tokens that kl_cov penalises.", gt=0, le=1)
    kl_cov_coef: float = of_kl_cov(1.0, "Weight of that penalty.", ge=0)
    dpo_beta: float = of_dpo(0.1, "DPO's beta: strength of the KL constraint to the reference.", gt=0)
    dpo_label_smoothing: float = of_dpo(
        0.0, "DPO: assumed probability that a pair is labelled the wrong way round.", ge=0, lt=0.5
    )
    use_tis: bool = of_policy(
        False,
        "Weight tokens by the ratio of the trainer's probability to the engine's (truncated importance"
        " sampling). On by default where --pipeline trains tokens of older weights (docs/guides/pipelines.md).",
    )
    tis_clip: float = of_tis(2.0, "Upper bound on the importance weight.", gt=0)
    tis_clip_low: float = of_tis(0.0, "Lower bound on the importance weight.", ge=0)
    tis_level: Literal["token", "sequence", "geometric"] = of_tis(
        "token", "Importance weight per token, or the product or geometric mean over its sample."
    )
    tis_mode: Literal["truncate", "mask", "none"] = of_tis(
        "truncate", "Weights out of range are clipped (truncate) or set to 0 (mask); none: all weights are 1."
    )
    tis_veto: float | None = of_policy(
        None, "Leave out samples with a token whose importance weight is below this value.", gt=0, lt=1
    )
    rejection_level: Literal["token", "sequence", "geometric"] | None = of_policy(
        None, "Leave out samples whose importance weight at this level is out of the rejection range."
    )
    rejection_low: float = of_rejection(0.5, "Lower end of the rejection range.", ge=0)
    rejection_high: float = of_rejection(2.0, "Upper end of the rejection range.", gt=0)
    custom_tis_function_path: str | None = of_policy(
        None, "Function that corrects the policy loss for the engine's log-probs; replaces the tis flags."
    )
    use_opsm: bool = of_policy(False, "Off-policy masking: leave out far off-policy samples with a negative advantage.")
    opsm_delta: float = acting(scopes.POLICY, scopes.OPSM)(
        1e-4, "Mean log-ratio above which a sample is far off-policy, nats.", ge=0
    )
    use_unbiased_kl: bool = of_kl_loss(False, "Weight the KL term by the policy's ratio to the sampling policy.")
    use_kl_loss: bool = of_policy(False, "Add a KL term to the reference model to the loss.")
    kl_loss_coef: float = of_kl_loss(0.0, "Coefficient of the KL term in the loss.", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = acting(scopes.POLICY, scopes.KL_LOSS)(
        "k3", "Estimator of the KL term."
    )
    entropy_coef: float = of_policy(0.0, "Coefficient of the entropy bonus.", ge=0)
    use_opd: bool = only_of_rl(False, "On-policy distillation: a teacher scores each response token by its log-prob.")
    opd_type: Literal["sglang", "megatron"] = of_distillation(
        "sglang", "Where the teacher's log-probs are computed: in its own engines, or in the trainers."
    )
    opd_kl_coef: float = of_distillation(1.0, "Coefficient of the reverse KL to the teacher.", ge=0)
    opd_teacher_load: str | None = of_distillation(
        None, "Folder of the teacher, with the policy's tokenizer. Default: your function sets teacher_log_probs."
    )
    opd_teacher_num_gpus: int = of_teacher_engines(1, "Devices of the teacher's engines in all.", ge=1)
    opd_teacher_num_gpus_per_engine: int = of_teacher_engines(1, "Devices of one (its tensor parallel size).", ge=1)
    opd_teacher_server_args: JsonObject = of_teacher_engines({}, "SGLang ServerArgs fields of these engines, as JSON.")
    calculate_per_token_loss: bool = acting(scopes.TRAINS, scopes.AGGREGATED)(
        True, "Average the loss over all tokens; off: over samples of their token means."
    )
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = of_rl(
        "policy_loss",
        "The loss of --mode rl; custom_loss calls --custom-loss-function-path. --mode sft always uses sft_loss.",
    )
    custom_loss_function_path: str | None = of_rl(
        None, "Function that computes the loss of a micro-batch from its logits (--loss-type custom_loss)."
    )
    use_rollout_logprobs: bool = of_policy(False, "Use the engine's log-probs for the old policy, without recomputing.")
    use_routing_replay: bool = only_of_rl(
        False, "Experts: route tokens in all steps of a rollout as in its log-prob pass (docs/guides/models.md)."
    )
    use_rollout_routing_replay: bool = only_of_rl(
        False, "Experts: route tokens as the engine did, by rollout_routed_experts (docs/guides/models.md)."
    )


class CriticGroup(Group):
    """Critic (--advantage-estimator ppo)"""

    critic_load: str | None = of_critic(
        None,
        "Hugging Face folder that the critic starts with. Default: --hf-checkpoint with a value head that returns 0.",
    )
    critic_lr: float | None = of_critic(None, "Learning rate of the critic. Default: --lr.", ge=0)
    critic_lr_warmup_iters: int | None = of_critic(None, "Its warm-up, in steps. Default: --lr-warmup-iters.", ge=0)
    critic_num_gpus: int | None = of_critic(None, "Devices of the critic alone. Default: it shares the actor's.", ge=1)
    critic_tensor_model_parallel_size: int | None = of_critic(None, "Tensor parallel size. Default: the actor's.", ge=1)
    critic_pipeline_model_parallel_size: int | None = of_critic(None, "Pipeline parallel size of the critic.", ge=1)
    critic_context_parallel_size: int | None = of_critic(None, "Context parallel size of the critic.", ge=1)
    critic_expert_model_parallel_size: int | None = of_critic(None, "Expert parallel size of the critic.", ge=1)
    num_critic_only_steps: int = of_critic(0, "Number of first rollouts that train only the critic.", ge=0)
    value_clip: float = of_critic(0.2, "Clip range of a value around its value before the step.", gt=0)


class PrmGroup(Group):
    """Process reward model (--advantage-estimator prime)"""

    prm_load: str | None = of_prm(
        None, "Folder of the initial reward model, also the reference of its log-ratios. Default: --hf-checkpoint."
    )
    prm_lr: float | None = of_prm(
        None, "Learning rate of the reward model, trained to tell raw rewards above 0 from others. Default: --lr.", ge=0
    )
    prm_lr_warmup_iters: int | None = of_prm(None, "Its warm-up, optimizer steps. Default: --lr-warmup-iters.", ge=0)
    prm_beta: float = of_prm(0.05, "Process reward per nat of log-ratio to the initial reward model.", gt=0)
    prm_process_coef: float = of_prm(1.0, "Weight of the process rewards in the advantage.", ge=0)
    prm_outcome_coef: float = of_prm(1.0, "Weight of the outcome in the advantage.", ge=0)
    prm_num_gpus: int | None = of_prm(None, "Devices of the reward model alone. Default: it shares the actor's.", ge=1)
    prm_tensor_model_parallel_size: int | None = of_prm(None, "Tensor parallel size. Default: the actor's.", ge=1)
    prm_pipeline_model_parallel_size: int | None = of_prm(None, "Pipeline parallel size of the reward model.", ge=1)
    prm_context_parallel_size: int | None = of_prm(None, "Context parallel size of the reward model.", ge=1)
    prm_expert_model_parallel_size: int | None = of_prm(None, "Expert parallel size of the reward model.", ge=1)


OVERLONG_SHARE = 0.2  # DAPO's buffer: 4,096 of 20,480 tokens


def with_preset(values: dict[str, object]) -> dict[str, object]:
    """Return `values` (flags that were given) completed by the preset that they name, if they name one."""
    name = values.get("algorithm")
    preset = dict(PRESETS.get(str(name), {}))
    longest = str(values.get("rollout_max_response_len", ""))
    if name == "dapo" and longest.isdecimal():
        preset["overlong_buffer_len"] = max(1, round(OVERLONG_SHARE * int(longest)))
    if str(values.get("use_kl_loss", True)) in ("False", "false"):
        preset.pop("kl_loss_coef", None)  # the KL term is switched off, and its coefficient with it
    return preset | values
