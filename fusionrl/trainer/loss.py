"""The loss of a micro-batch, and its metrics as sums that are right when added up over ranks.

One denominator: the loss is `sum_t weights_t * l_t`, where `weights` already hold the global count of the
optimizer step (see `micro_batches.py`). So losses and gradients are sums over micro-batches and ranks, and no split
changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusionrl.algorithms.corrections import CorrectionOptions, importance_weights, opsm_mask
from fusionrl.algorithms.divergence import KL_ESTIMATORS, MISMATCH_SUMS, mismatch_sums, unbiased_kl
from fusionrl.algorithms.estimators import LOSSES, Role
from fusionrl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss, PolicyLossOptions, guarded, value_loss
from fusionrl.algorithms.sequences import Sequences
from fusionrl.algorithms.token_advantages import implicit_reward_loss, implicit_rewards
from fusionrl.config.config import Config
from fusionrl.config.pipeline import corrects_by_default
from fusionrl.config.run_parts import policy_loss_name
from fusionrl.config.scopes import flags_as
from fusionrl.trainer.micro_batches import MicroBatch
from fusionrl.trainer.process_groups import sum_over_context_ranks
from fusionrl.trainer.step_report import MISMATCH, MISMATCH_PEAK

if TYPE_CHECKING:
    from fusionrl.trainer.loss_hooks import LossHooks


@dataclass(frozen=True)
class LossOptions:
    """The options of a loss."""

    mode: str  # rl, sft, value: a critic's, or outcome: a process reward model's
    policy_loss: str = "ppo"  # a name of LOSSES
    constants: PolicyLossOptions = field(default_factory=PolicyLossOptions)  # of the policy losses
    correction: CorrectionOptions | None = None  # None: the engine's log-probs are not corrected for
    is_default: bool = False  # the user did not request the correction: without the engine's log-probs it is left out
    kl_coef: float | None = None  # None: no KL term
    kl_type: str = "k3"
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0
    opsm_delta: float | None = None  # None: no off-policy sequence masking
    use_rollout_log_probs: bool = False
    needs_log_probs: bool = False  # the trainers' log-probs of before the first step, even where there is only one
    custom_policy_loss_path: str | None = None
    value_clip: float | None = None
    prm_beta: float = 0.0
    mtp_factor: float = 0.0  # of the loss of layers of multi-token prediction

    @classmethod
    def from_config(cls, config: Config, role: Role | None = None) -> LossOptions:
        """The options of `config`."""
        a, train = config.algorithm, config.train
        if role == "critic":
            return cls(mode="value", value_clip=config.critic.value_clip)
        if role == "prm":
            return cls(mode="outcome", prm_beta=config.prm.prm_beta)
        correction = None
        # A user's function replaces all of the correction.
        if a.custom_tis_function_path is None and (a.use_tis or a.rejection_level or a.tis_veto is not None):
            correction = CorrectionOptions(
                level=a.tis_level,
                mode=a.tis_mode if a.use_tis else "none",
                low=a.tis_clip_low,
                high=a.tis_clip,
                reject_level=a.rejection_level,
                reject_low=a.rejection_low,
                reject_high=a.rejection_high,
                veto=a.tis_veto,
            )
        eps_high = a.eps_clip if a.eps_clip_high is None else a.eps_clip_high
        return cls(
            mode="sft" if "sft" in (config.run.mode, a.loss_type[:3]) else "rl",
            policy_loss=policy_loss_name(a),
            constants=flags_as(PolicyLossOptions, a, eps_low=a.eps_clip, eps_high=eps_high, dual_clip=a.eps_clip_c),
            correction=correction,
            is_default=corrects_by_default(config),
            kl_coef=a.kl_loss_coef if a.use_kl_loss else None,
            kl_type=a.kl_loss_type,
            use_unbiased_kl=a.use_unbiased_kl,
            entropy_coef=a.entropy_coef,
            opsm_delta=a.opsm_delta if a.use_opsm else None,
            use_rollout_log_probs=a.use_rollout_logprobs,
            needs_log_probs=a.loss_type == "custom_loss"
            or train.custom_advantage_function_path is not None
            or train.rollout_data_postprocess_path is not None,
            custom_policy_loss_path=a.custom_policy_loss_path,
            mtp_factor=train.mtp_loss_scaling_factor,
        )

    @property
    def token_loss(self) -> PolicyLoss:
        """The policy loss of tokens."""
        if self.custom_policy_loss_path is not None:
            from fusionrl.trainer.train_hooks import policy_loss_of

            return guarded(policy_loss_of(self.custom_policy_loss_path))
        # With a pair's slope as the advantage (`advantages.pair_advantages`), DPO's gradient is a policy gradient.
        return POLICY_LOSSES["gpg" if self.policy_loss == "dpo" else self.policy_loss]


@dataclass
class LossSums:
    """A micro-batch's part of a `StepReport`, to be added up over micro-batches and ranks; fp64.

    sums, token_sums, sequence_sums, maxima   as of a `StepReport`
    finite      [N] bool: whether each token's loss is; looked at only where a step is skipped
    batch       the micro-batch
    scores      [2, N] log-probs and entropies; None if they are not kept
    """

    sums: dict[str, Tensor]
    token_sums: dict[str, Tensor]
    finite: Tensor | None = None
    batch: MicroBatch | None = None
    sequence_sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    scores: Tensor | None = None

    def bad_samples(self) -> list[int]:
        """The shard's samples with a token whose loss is not finite."""
        if self.finite is None or self.batch is None:
            return []
        positions = self.batch.sequences[~self.finite].unique()
        return [self.batch.samples[position] for position in positions.tolist()]


METRICS = """
train/loss | loss | The quantity that is optimized, in the aggregation of --loss-aggregation: policy loss +
    --kl-loss-coef x KL - --entropy-coef x entropy. In mode sft the mean of -log p. Mean over the optimizer steps.
train/pg_loss | loss | Its part without KL and entropy, aggregated in the same way. | mode rl
train/entropy | nats | Entropy of the policy's next-token distribution at --rollout-temperature, mean over tokens. |
    mode rl
train/kl_loss | nats | Estimate of KL(policy || reference) by --kl-loss-type, without its coefficient, mean over
    tokens. | --use-kl-loss
train/advantage_mean | reward | Mean advantage over tokens. | mode rl
train/advantage_abs_max | reward | The largest |advantage| of a token, over all optimizer steps of the rollout;
    infinite where one is NaN. | mode rl
train/clip_fraction_tokens | share | Share of tokens in clipped samples: to compare gspo with methods that clip
    tokens. Steps as of train/ppo_kl. | --policy-loss gspo, gspo_token
critic/loss | loss | Half the squared error of the values (clipped with --value-clip), in the aggregation of
    --loss-aggregation. Mean over the optimizer steps.
critic/value_error | reward | Mean over tokens of |value before the first optimizer step - return|.
critic/value_mean | reward | Mean value over tokens.
critic/return_mean | reward | Mean return over tokens: what the values are trained towards.
prm/loss | loss | Cross entropy of the outcome, summed over samples with a trained token and divided by all samples.
    Mean over the optimizer steps.
prm/accuracy | share | Share of samples with a trained token whose outcome the sign of the implicit reward predicts.
prm/implicit_reward | nats | Mean over these samples of --prm-beta x (log p(model) - log p(its start)), summed over
    the tokens.
prm/outcome | share | Share of these samples with a raw reward above 0.
prm/excluded | tokens | Tokens left out because a log-prob is -inf or NaN.
"""


def micro_batch_loss(
    log_probs: Tensor,
    entropy: Tensor,
    batch: MicroBatch,
    options: LossOptions,
    compare: bool,
    hooks: LossHooks | None = None,
) -> tuple[Tensor, LossSums]:
    """Loss (a sum, see above) of the N chosen tokens of one micro-batch.

    log_probs, entropy     [N] of the policy that is trained, with gradient; of a critic its values
    batch, options, hooks  the micro-batch, the loss, and a user's functions within it
    compare                report how far the engine's log-probs are off; only right while the weights are those that
                           the rollout was made with

    Raises ValueError if the engine's log-probs are to be the old policy's, and the shard has none.
    """
    mask = batch.fields["loss_mask"]
    of_sequences: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    if options.mode == "sft":
        losses = -log_probs
        loss = (batch.weights * losses).sum()
        sums = {"loss": loss}
    elif options.mode == "value":
        returns = batch.fields["returns"]
        losses, means = value_loss(log_probs, batch.fields["values"], returns, options.value_clip)
        loss = (batch.weights * losses).sum()
        error = (batch.fields["values"] - returns).abs()
        sums = {"loss": loss}
        means |= {"value_error": error, "return_mean": returns, "value_mean": log_probs}
    elif options.mode == "outcome":
        losses, sums, of_sequences = _outcome_terms(log_probs, batch, options.prm_beta)
        loss = sums["loss"]
    else:
        loss, losses, sums, means = _policy_terms(log_probs, entropy, batch, options, hooks)
        if LOSSES[options.policy_loss].clips_sequences:
            of_sequences = {"clip_fraction": means["clip_fraction"]}
            means["clip_fraction_tokens"] = means.pop("clip_fraction")
    token_sums = {"tokens": mask.sum()} | {name: (mask * value).sum() for name, value in means.items()}
    shares = batch.sequence_shares
    sequence_sums = {"sequences": shares} | {name: shares * value for name, value in of_sequences.items()}
    sequence_sums = {name: value.sum() for name, value in sequence_sums.items()}
    maxima: dict[str, Tensor] = {}
    if options.mode == "rl":
        # Infinity in place of NaN, which compares false with everything: over ranks a maximum might lose it.
        sizes = batch.fields["advantages"].detach().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        maxima["advantage_abs_max"] = torch.cat([sizes, sizes.new_zeros(1)]).max()
    if options.mode == "rl" and compare and "rollout_log_probs" in batch.fields:
        reference, engine = batch.fields.get("log_probs", log_probs.detach()), batch.fields["rollout_log_probs"]
        # Of a token that older weights sampled, the difference would say how far the weights have moved since.
        compared = mask * batch.fields.get("current", 1.0)
        mismatch, peak = mismatch_sums(reference, engine, compared)
        token_sums |= {MISMATCH + name: value for name, value in zip(MISMATCH_SUMS, mismatch, strict=True)}
        maxima[MISMATCH_PEAK] = peak[0]
    finite = losses.detach().isfinite()
    return loss, LossSums(_kept(sums), _kept(token_sums), finite, batch, _kept(sequence_sums), _kept(maxima))


def _kept(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().double() for name, value in values.items()}


def _outcome_terms(
    log_probs: Tensor, batch: MicroBatch, beta: float
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(losses of tokens: of each that of its sample; sums; values of tokens of which the mean over samples counts)."""
    labels = batch.fields["outcomes"]
    rewards, excluded = implicit_rewards(log_probs, batch.fields["ref_log_probs"], batch.fields["loss_mask"], beta)
    sequences = Sequences(batch.sequences, len(batch.samples), sum_over_context_ranks())
    totals = sequences.spread(sequences.sum(rewards))
    losses = implicit_reward_loss(totals, labels)
    right = ((totals > 0) == (labels > 0)).to(losses.dtype)
    sums = {"loss": (batch.weights * losses).sum(), "excluded": excluded}
    return losses, sums, {"accuracy": right, "implicit_reward": totals, "outcome": labels}


def _policy_terms(
    log_probs: Tensor, entropy: Tensor, batch: MicroBatch, options: LossOptions, hooks: LossHooks | None
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, losses of tokens, sums that have the loss's weights, values of tokens of which the mean counts)."""
    fields, mask = batch.fields, batch.fields["loss_mask"]
    correction = None if options.is_default and "rollout_log_probs" not in fields else options.correction
    if (options.use_rollout_log_probs or correction is not None) and "rollout_log_probs" not in fields:
        flag = "--use-rollout-logprobs" if options.use_rollout_log_probs else "--use-tis, --rejection-level, --tis-veto"
        raise ValueError(f"{flag}: the rollout has no log-probs; let the engines return them, or leave the flag out")
    # One optimizer step a rollout: the policy that acted is the one of this very forward pass.
    recomputed = fields.get("log_probs", log_probs.detach())
    old = fields["rollout_log_probs"] if options.use_rollout_log_probs else recomputed
    sequences = Sequences(batch.sequences, len(batch.samples), sum_over_context_ranks())
    extra = {"selected": fields["selected"] > 0} if LOSSES[options.policy_loss].selects else {}
    advantages = fields["advantages"]
    losses, means = options.token_loss(log_probs, old, advantages, mask, sequences, options.constants, **extra)
    if correction is not None:
        inputs = (recomputed, fields["rollout_log_probs"], mask, sequences, correction)
        weights, keep, added_means = importance_weights(*inputs)
        losses, means = torch.where(keep, losses * weights, 0.0), means | added_means
    if options.opsm_delta is not None:
        acted = fields.get("rollout_log_probs", old)  # with one step a rollout, `old` is the policy as it is
        current = log_probs.detach()
        keep, added_means = opsm_mask(current, acted, advantages, mask, sequences, options.opsm_delta)
        losses, means = torch.where(keep, losses, 0.0), means | added_means
    loss = (batch.weights * losses).sum()
    if hooks is not None:
        loss, added_means = hooks.policy_loss(losses, recomputed, batch)
        means |= added_means
    sums = {"pg_loss": loss}
    means = means | {"entropy": entropy}
    if options.entropy_coef > 0:
        bonus = -options.entropy_coef * entropy  # A3C (arXiv 1602.01783), section 4
        losses, loss = losses + bonus, loss + (batch.weights * bonus).sum()
    if options.kl_coef is not None:
        reference = fields["ref_log_probs"]
        if options.use_unbiased_kl:
            kl = unbiased_kl(log_probs, old, reference, options.kl_type)
        else:
            kl = KL_ESTIMATORS[options.kl_type](log_probs, reference)
        means["kl_loss"] = kl
        losses, loss = losses + kl, loss + options.kl_coef * (batch.weights * kl).sum()
    return loss, losses, {"loss": loss} | sums, means | {"advantage_mean": advantages}
