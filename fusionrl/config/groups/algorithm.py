"""Advantages and losses, and the models trained next to the policy: AlgorithmGroup, CriticGroup, PrmGroup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fusionrl.algorithms.estimators import ESTIMATORS
from fusionrl.algorithms.losses import LOSSES
from fusionrl.config.groups.base import Group
from fusionrl.config.presets import PRESETS

# The tables decide what these flags take. A type checker cannot read a Literal of a table.
if TYPE_CHECKING:
    AlgorithmName = str
    EstimatorName = str
    PolicyLossName = str
else:
    AlgorithmName = Literal[tuple(PRESETS)]
    EstimatorName = Literal[tuple(ESTIMATORS)]
    PolicyLossName = Literal[("auto", *(name for name, loss in LOSSES.items() if loss.is_flag))]


class AlgorithmGroup(Group):
    """Algorithm"""

    algorithm: AlgorithmName | None = Field(
        None,
        description="Set the flags of a published algorithm (docs/guides/algorithms.md); any flag you also pass"
        " overrides the preset.",
    )
    advantage_estimator: EstimatorName = Field(
        "grpo",
        description="Advantage estimator (docs/guides/algorithms.md); gspo and cispo use grpo's advantages with their"
        " own policy loss.",
    )
    pass_k: int = Field(1, description="Answers that count as one try, for --advantage-estimator pass_at_k.", ge=1)
    gamma: float = Field(1.0, description="Discount of token rewards (reinforce_plus_plus, ppo, prime).", ge=0, le=1)
    lambd: float = Field(1.0, description="Lambda of GAE (ppo).", ge=0, le=1)
    bootstrap_truncated: bool = Field(
        False,
        description="GAE (ppo): bootstrap a response cut at its length limit from the critic's last value, not from 0.",
    )
    normalize_advantages: bool = Field(
        False,
        description="Whiten advantages over all tokens of a rollout; reinforce_plus_plus and prime always do.",
    )
    kl_coef: float = Field(
        0.0,
        description="Coefficient of the KL penalty to the reference in each token's reward (reinforce_plus_plus, ppo).",
        ge=0,
    )
    kl_coef_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k1",
        description="Estimator of that KL; k2 and k3 are never negative, and also penalise a token that became less"
        " likely.",
    )
    policy_loss: PolicyLossName = Field(
        "auto",
        description="Policy loss (docs/guides/algorithms.md); auto is gspo or cispo for the estimators of that name,"
        " otherwise ppo.",
    )
    custom_policy_loss_path: str | None = Field(
        None, description="Function that computes the policy loss of each token, in place of --policy-loss."
    )
    loss_aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = Field(
        "auto",
        description="Aggregation of token losses: mean over all tokens, mean over samples of token means, or mean over"
        " samples of token sums / --loss-length. auto: follow --calculate-per-token-loss.",
    )
    loss_length: int | None = Field(
        None,
        description="Length that --loss-aggregation constant divides by. Default: --rollout-max-response-len.",
        ge=1,
    )
    custom_pg_loss_reducer_function_path: str | None = Field(
        None, description="Function that returns the function that reduces a micro-batch's policy losses to a number."
    )
    disable_grpo_std_normalization: bool = Field(
        False, description="Do not divide advantages by the group's standard deviation."
    )
    disable_rewards_normalization: bool = Field(False, description="Use raw rewards as advantages.")
    eps_clip: float = Field(0.2, description="Lower clip range of the policy ratio.", gt=0)
    eps_clip_high: float | None = Field(None, description="Upper clip range. Default: --eps-clip.", gt=0)
    eps_clip_c: float | None = Field(
        None, description="Dual clip: bound the loss of a negative advantage by this multiple of its size.", gt=1
    )
    sapo_tau_pos: float = Field(1.0, description="SAPO's temperature for positive advantages.", gt=0)
    sapo_tau_neg: float = Field(1.05, description="SAPO's temperature for zero and negative advantages.", gt=0)
    clip_cov_fraction: float = Field(2e-4, description="Share of tokens whose gradient clip_cov stops.", gt=0, le=1)
    clip_cov_low: float = Field(1.0, description="Lower bound on the covariance of such a token.")
    clip_cov_high: float = Field(5.0, description="Upper bound on the covariance of such a token.")
    kl_cov_fraction: float = Field(2e-4, description="Share of tokens that kl_cov penalises.", gt=0, le=1)
    kl_cov_coef: float = Field(1.0, description="Weight of that penalty.", ge=0)
    dpo_beta: float = Field(0.1, description="DPO's beta: strength of the KL constraint to the reference.", gt=0)
    dpo_label_smoothing: float = Field(
        0.0, description="DPO: assumed probability that a pair is labelled the wrong way round.", ge=0, lt=0.5
    )
    use_tis: bool = Field(
        False,
        description="Weight tokens by the ratio of the trainer's probability to the engine's (truncated importance"
        " sampling). On by default where --pipeline trains tokens of older weights (docs/guides/pipelines.md).",
    )
    tis_clip: float = Field(2.0, description="Upper bound on the importance weight.", gt=0)
    tis_clip_low: float = Field(0.0, description="Lower bound on the importance weight.", ge=0)
    tis_level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="Importance weight per token, or the product or geometric mean over its sample.",
    )
    tis_mode: Literal["truncate", "mask", "none"] = Field(
        "truncate",
        description="Weights out of range are clipped (truncate) or set to 0 (mask); none: all weights are 1.",
    )
    tis_veto: float | None = Field(
        None, description="Leave out samples with a token whose importance weight is below this value.", gt=0, lt=1
    )
    rejection_level: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="Leave out samples whose importance weight at this level is out of the rejection range."
    )
    rejection_low: float = Field(0.5, description="Lower end of the rejection range.", ge=0)
    rejection_high: float = Field(2.0, description="Upper end of the rejection range.", gt=0)
    custom_tis_function_path: str | None = Field(
        None, description="Function that corrects the policy loss for the engine's log-probs; replaces the tis flags."
    )
    use_opsm: bool = Field(
        False,
        description="Off-policy sequence masking: leave out samples with a negative advantage that are far off-policy.",
    )
    opsm_delta: float = Field(1e-4, description="Mean log-ratio above which a sample is far off-policy, nats.", ge=0)
    use_unbiased_kl: bool = Field(
        False, description="Weight the KL term by the ratio of the policy to the sampling policy, which unbiases it."
    )
    use_kl_loss: bool = Field(False, description="Add a KL term to the reference model to the loss.")
    kl_loss_coef: float = Field(0.0, description="Coefficient of the KL term in the loss.", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field("k3", description="Estimator of the KL term.")
    entropy_coef: float = Field(0.0, description="Coefficient of the entropy bonus.", ge=0)
    use_opd: bool = Field(
        False, description="On-policy distillation: a teacher scores each token of a response by its log-prob."
    )
    opd_type: Literal["sglang", "megatron"] = Field(
        "sglang", description="Where the teacher's log-probs are computed: in its own engines, or in the trainers."
    )
    opd_kl_coef: float = Field(1.0, description="Coefficient of the reverse KL to the teacher.", ge=0)
    opd_teacher_load: str | None = Field(
        None,
        description="Hugging Face folder of the teacher; its tokenizer must match --hf-checkpoint. Default: your"
        " function sets teacher_log_probs.",
    )
    opd_teacher_num_gpus: int = Field(1, description="Devices of the teacher's engines in all.", ge=1)
    opd_teacher_num_gpus_per_engine: int = Field(
        1, description="Devices of one of them (its tensor parallel size).", ge=1
    )
    opd_teacher_server_args: dict[str, Any] = Field(
        default_factory=dict, description="SGLang ServerArgs fields of the teacher's engines, as JSON."
    )
    calculate_per_token_loss: bool = Field(
        True, description="Average the loss over all tokens; off: over samples of their token means."
    )
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = Field(
        "policy_loss",
        description="The loss of --mode rl; custom_loss calls --custom-loss-function-path. --mode sft always uses"
        " sft_loss.",
    )
    custom_loss_function_path: str | None = Field(
        None, description="Function that computes the loss of a micro-batch from its logits (--loss-type custom_loss)."
    )
    use_rollout_logprobs: bool = Field(
        False, description="Use the engine's log-probs as those of the old policy instead of recomputing them."
    )
    use_routing_replay: bool = Field(
        False,
        description="Mixtures of experts: in all optimizer steps of a rollout, send each token to the experts of the"
        " log-prob pass before the first (docs/guides/models.md).",
    )
    use_rollout_routing_replay: bool = Field(
        False,
        description="Mixtures of experts: in log-prob pass and steps, send each token to the experts that the engine"
        " chose, the samples' rollout_routed_experts (docs/guides/models.md).",
    )


class CriticGroup(Group):
    """Critic (--advantage-estimator ppo)"""

    critic_load: str | None = Field(
        None,
        description="Hugging Face folder that the critic starts with. Default: --hf-checkpoint with a value head that"
        " returns 0.",
    )
    critic_lr: float | None = Field(None, description="Learning rate of the critic. Default: --lr.", ge=0)
    critic_lr_warmup_iters: int | None = Field(
        None, description="Its warm-up, optimizer steps. Default: --lr-warmup-iters.", ge=0
    )
    critic_num_gpus: int | None = Field(
        None, description="Devices of the critic alone. Default: it shares the actor's.", ge=1
    )
    critic_tensor_model_parallel_size: int | None = Field(
        None, description="Tensor parallel size of the critic. Default: as the actor's, here and below.", ge=1
    )
    critic_pipeline_model_parallel_size: int | None = Field(
        None, description="Pipeline parallel size of the critic.", ge=1
    )
    critic_context_parallel_size: int | None = Field(None, description="Context parallel size of the critic.", ge=1)
    critic_expert_model_parallel_size: int | None = Field(None, description="Expert parallel size of the critic.", ge=1)
    num_critic_only_steps: int = Field(0, description="Number of first rollouts that train only the critic.", ge=0)
    value_clip: float = Field(0.2, description="Clip range of a value around its value before the step.", gt=0)


class PrmGroup(Group):
    """Process reward model (--advantage-estimator prime)"""

    prm_load: str | None = Field(
        None,
        description="Hugging Face folder of the initial reward model, also the reference of its log-ratios."
        " Default: --hf-checkpoint.",
    )
    prm_lr: float | None = Field(
        None,
        description="Learning rate of the reward model, trained to separate raw rewards above 0 from the rest."
        " Default: --lr.",
        ge=0,
    )
    prm_lr_warmup_iters: int | None = Field(
        None, description="Its warm-up, optimizer steps. Default: --lr-warmup-iters.", ge=0
    )
    prm_beta: float = Field(0.05, description="Process reward per nat of log-ratio to the initial reward model.", gt=0)
    prm_process_coef: float = Field(1.0, description="Weight of the process rewards in the advantage.", ge=0)
    prm_outcome_coef: float = Field(1.0, description="Weight of the outcome in the advantage.", ge=0)
    prm_num_gpus: int | None = Field(
        None, description="Devices of the reward model alone. Default: it shares the actor's.", ge=1
    )
    prm_tensor_model_parallel_size: int | None = Field(
        None, description="Tensor parallel size of the reward model. Default: as the actor's, here and below.", ge=1
    )
    prm_pipeline_model_parallel_size: int | None = Field(
        None, description="Pipeline parallel size of the reward model.", ge=1
    )
    prm_context_parallel_size: int | None = Field(None, description="Context parallel size of the reward model.", ge=1)
    prm_expert_model_parallel_size: int | None = Field(
        None, description="Expert parallel size of the reward model.", ge=1
    )
