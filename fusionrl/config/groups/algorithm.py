"""Advantages and losses, and the models that are trained beside the policy: AlgorithmGroup, CriticGroup, PrmGroup."""

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
        description="Set the flags of a published algorithm (docs/guides/algorithms.md); flags that you also pass win.",
    )
    advantage_estimator: EstimatorName = Field(
        "grpo",
        description="Advantage estimator (docs/guides/algorithms.md); gspo, cispo: grpo with their own policy loss.",
    )
    pass_k: int = Field(1, description="Answers that count as one try, for --advantage-estimator pass_at_k.", ge=1)
    gamma: float = Field(1.0, description="Discount of token rewards (reinforce_plus_plus, ppo, prime).", ge=0, le=1)
    lambd: float = Field(1.0, description="Lambda of GAE (ppo).", ge=0, le=1)
    bootstrap_truncated: bool = Field(
        False,
        description="GAE (ppo): after a response cut at its length limit stands the critic's last value, not 0.",
    )
    normalize_advantages: bool = Field(
        False,
        description="Whiten advantages over all tokens of a rollout; reinforce_plus_plus and prime always do.",
    )
    kl_coef: float = Field(
        0.0,
        description="Price of the KL to the reference in each token's reward (reinforce_plus_plus, ppo).",
        ge=0,
    )
    kl_coef_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k1",
        description="Estimator of that KL; k2 and k3 are never negative and also charge for being less likely.",
    )
    policy_loss: PolicyLossName = Field(
        "auto",
        description="Policy loss (docs/guides/algorithms.md); auto: gspo, cispo for the estimators so named, else ppo.",
    )
    custom_policy_loss_path: str | None = Field(
        None, description="Function that computes the policy loss of each token, in place of --policy-loss."
    )
    loss_aggregation: Literal["auto", "token_mean", "sequence_mean", "constant"] = Field(
        "auto",
        description="How tokens' losses become one: mean over all tokens, over samples of their token means, or over"
        " samples of their sums / --loss-length. auto: as --calculate-per-token-loss says.",
    )
    loss_length: int | None = Field(
        None,
        description="Length that --loss-aggregation constant divides by. Default: --rollout-max-response-len.",
        ge=1,
    )
    custom_pg_loss_reducer_function_path: str | None = Field(
        None, description="Function that makes the function by which a micro-batch's policy losses become one number."
    )
    disable_grpo_std_normalization: bool = Field(False, description="Do not divide by the group's deviation.")
    disable_rewards_normalization: bool = Field(False, description="Use raw rewards as advantages.")
    eps_clip: float = Field(0.2, description="Lower clip range of the policy ratio.", gt=0)
    eps_clip_high: float | None = Field(None, description="Upper clip range. Default: --eps-clip.", gt=0)
    eps_clip_c: float | None = Field(
        None, description="Dual clip: a negative advantage's loss is at most so many times its size.", gt=1
    )
    sapo_tau_pos: float = Field(1.0, description="SAPO's temperature for positive advantages.", gt=0)
    sapo_tau_neg: float = Field(1.05, description="SAPO's temperature for other advantages.", gt=0)
    clip_cov_fraction: float = Field(2e-4, description="Share of tokens that clip_cov detaches.", gt=0, le=1)
    clip_cov_low: float = Field(1.0, description="Lowest covariance of such a token.")
    clip_cov_high: float = Field(5.0, description="Highest covariance of such a token.")
    kl_cov_fraction: float = Field(2e-4, description="Share of tokens that kl_cov penalises.", gt=0, le=1)
    kl_cov_coef: float = Field(1.0, description="Weight of that penalty.", ge=0)
    dpo_beta: float = Field(0.1, description="DPO's beta: what a nat of divergence from the reference costs.", gt=0)
    dpo_label_smoothing: float = Field(
        0.0, description="DPO: the chance that a pair is the wrong way round.", ge=0, lt=0.5
    )
    use_tis: bool = Field(
        False,
        description="Weigh tokens by how likely the trainers find them against the engine (importance sampling). On by"
        " default where --pipeline trains tokens of older weights (docs/guides/pipelines.md).",
    )
    tis_clip: float = Field(2.0, description="Highest such weight.", gt=0)
    tis_clip_low: float = Field(0.0, description="Lowest such weight.", ge=0)
    tis_level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="Of what the weight is: a token, the product over its sample, or the geometric mean over it.",
    )
    tis_mode: Literal["truncate", "mask", "none"] = Field(
        "truncate", description="What becomes of weights outside of the range: moved into it, or 0; none: all are 1."
    )
    tis_veto: float | None = Field(
        None, description="Leave out samples with a token that the trainers find so many times less likely.", gt=0, lt=1
    )
    rejection_level: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="Leave out samples whose weight, of this level, is out of the range of rejection."
    )
    rejection_low: float = Field(0.5, description="Lower end of that range.", ge=0)
    rejection_high: float = Field(2.0, description="Upper end of that range.", gt=0)
    custom_tis_function_path: str | None = Field(
        None, description="Function that corrects the policy loss for the engine's log-probs, in place of these."
    )
    use_opsm: bool = Field(
        False, description="Off-policy sequence masking: leave out samples with a negative advantage that are far off."
    )
    opsm_delta: float = Field(1e-4, description="Mean log-ratio from which on a sample is far off, nats.", ge=0)
    use_unbiased_kl: bool = Field(
        False, description="Weigh the KL term by the ratio of the policy to the one that acted, which unbiases it."
    )
    use_kl_loss: bool = Field(False, description="Add a KL term to the reference model to the loss.")
    kl_loss_coef: float = Field(0.0, description="Coefficient of the KL term in the loss.", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field("k3", description="Estimator of the KL term.")
    entropy_coef: float = Field(0.0, description="Coefficient of the entropy bonus.", ge=0)
    use_opd: bool = Field(
        False, description="On-policy distillation: a teacher says the log-prob of each token of a response."
    )
    opd_type: Literal["sglang", "megatron"] = Field(
        "sglang", description="What computes the teacher's log-probs: engines of its own, or the trainers."
    )
    opd_kl_coef: float = Field(1.0, description="Coefficient of the reverse KL to the teacher.", ge=0)
    opd_teacher_load: str | None = Field(
        None,
        description="Hugging Face folder of the teacher; its tokens are those of --hf-checkpoint. Default: a function"
        " of yours sets teacher_log_probs.",
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
        description="The loss of --mode rl; custom_loss is --custom-loss-function-path's. --mode sft has its own.",
    )
    custom_loss_function_path: str | None = Field(
        None, description="Function that computes the loss of a micro-batch from its logits (--loss-type custom_loss)."
    )
    use_rollout_logprobs: bool = Field(
        False, description="Take the engine's log-probs as the old policy's instead of computing them."
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
        None, description="Hugging Face folder that the critic starts with. Default: --hf-checkpoint, and values of 0."
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
    num_critic_only_steps: int = Field(0, description="First rollouts in which the critic alone is trained.", ge=0)
    value_clip: float = Field(0.2, description="How far a value may move from the one before the step.", gt=0)


class PrmGroup(Group):
    """Process reward model (--advantage-estimator prime)"""

    prm_load: str | None = Field(
        None,
        description="Hugging Face folder that the reward model starts with, and is measured against."
        " Default: --hf-checkpoint.",
    )
    prm_lr: float | None = Field(
        None,
        description="Learning rate of the reward model, which learns to tell raw rewards above 0 from others."
        " Default: --lr.",
        ge=0,
    )
    prm_lr_warmup_iters: int | None = Field(
        None, description="Its warm-up, optimizer steps. Default: --lr-warmup-iters.", ge=0
    )
    prm_beta: float = Field(
        0.05, description="Reward of a nat by which it finds a token likelier than at its start.", gt=0
    )
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
