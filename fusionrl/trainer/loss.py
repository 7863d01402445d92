"""The loss of a micro-batch, and its metrics as sums that are right when added up over ranks.

One denominator: the loss is `sum_t weights_t * l_t`, where `weights` already hold the global count of the
optimizer step (see `batch.py`). So losses and gradients are sums over micro-batches and ranks, and no split
changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusionrl.algorithms.entropy import entropy_bonus
from fusionrl.algorithms.kl import KL_ESTIMATORS, k3
from fusionrl.algorithms.policy_loss import policy_loss
from fusionrl.algorithms.sft import sft_loss
from fusionrl.config.config import Config
from fusionrl.trainer.batch import MicroBatch


@dataclass(frozen=True)
class LossOptions:
    """What the loss needs of the configuration."""

    mode: str
    eps_low: float
    eps_high: float
    kl_coef: float | None  # None: no KL term
    kl_type: str
    entropy_coef: float
    use_rollout_log_probs: bool
    needs_log_probs: bool  # the trainers' log-probs of before the first step, even where there is only one
    is_custom: bool  # --loss-type custom_loss

    @classmethod
    def from_config(cls, config: Config) -> LossOptions:
        """The options of `config`."""
        algorithm, train = config.algorithm, config.train
        return cls(
            mode="sft" if "sft" in (config.run.mode, algorithm.loss_type[:3]) else "rl",
            eps_low=algorithm.eps_clip,
            eps_high=algorithm.eps_clip_high if algorithm.eps_clip_high is not None else algorithm.eps_clip,
            kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else None,
            kl_type=algorithm.kl_loss_type,
            entropy_coef=algorithm.entropy_coef,
            use_rollout_log_probs=algorithm.use_rollout_logprobs,
            needs_log_probs=algorithm.loss_type == "custom_loss"
            or train.custom_advantage_function_path is not None
            or train.rollout_data_postprocess_path is not None,
            is_custom=algorithm.loss_type == "custom_loss",
        )


@dataclass
class LossSums:
    """Metrics of a micro-batch, to be added up; fp64.

    sums        reported as they are: the loss's weights are in them
    token_sums  divided by the tokens that are trained on, `tokens`; those of `compared_…` by `compared`
    peak        [1], whose maximum counts
    finite      [N] bool: whether each token's loss is; looked at only where a step is skipped
    batch       the micro-batch
    """

    sums: dict[str, Tensor]
    token_sums: dict[str, Tensor]
    peak: Tensor
    finite: Tensor | None = None
    batch: MicroBatch | None = None

    def bad_samples(self) -> list[int]:
        """The shard's samples with a token whose loss is not finite."""
        if self.finite is None or self.batch is None:
            return []
        positions = self.batch.sequences[~self.finite].unique()
        return [self.batch.samples[position] for position in positions.tolist()]


@dataclass
class _Terms:
    """The loss of each token and what is reported of it."""

    loss: Tensor
    weighted: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)


def micro_batch_loss(
    log_probs: Tensor, entropy: Tensor, batch: MicroBatch, options: LossOptions, compare: bool
) -> tuple[Tensor, LossSums]:
    """Loss (a sum, see above) of the chosen tokens of one micro-batch.

    Args:
        log_probs: [N] of the policy that is trained, with gradient.
        entropy: [N].
        batch: the micro-batch.
        options: see `LossOptions`.
        compare: report how far the engine's log-probs are off; only right while the weights are those that
            the rollout was made with.

    Raises:
        ValueError: the engine's log-probs are to be the old policy's, and the shard has none.
    """
    mask = batch.fields["loss_mask"]
    terms = _Terms(sft_loss(log_probs)) if options.mode == "sft" else _policy_terms(log_probs, entropy, batch, options)
    loss = (batch.weights * terms.loss).sum()
    sums = {"loss": loss} | {name: (batch.weights * value).sum() for name, value in terms.weighted.items()}
    token_sums = {"tokens": mask.sum()} | {name: (mask * value).sum() for name, value in terms.means.items()}
    peak = log_probs.new_zeros(1, dtype=torch.float64)
    if options.mode == "rl" and compare and "rollout_log_probs" in batch.fields:
        engine = batch.fields["rollout_log_probs"]
        reference = batch.fields.get("log_probs", log_probs.detach())
        difference = (reference - engine).abs() * mask
        token_sums["compared"] = mask.sum()
        token_sums["compared_logprob_diff_mean"] = difference.sum()
        token_sums["compared_logprob_k3"] = (k3(engine, reference) * mask).sum()
        if difference.numel():
            peak = difference.max().double().reshape(1)
    return loss, LossSums(_kept(sums), _kept(token_sums), peak, terms.loss.detach().isfinite(), batch)


def _kept(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().double() for name, value in values.items()}


def _policy_terms(log_probs: Tensor, entropy: Tensor, batch: MicroBatch, options: LossOptions) -> _Terms:
    fields = batch.fields
    if options.use_rollout_log_probs:
        if "rollout_log_probs" not in fields:
            raise ValueError(
                "--use-rollout-logprobs: the rollout has no log-probs; let the engines return them, "
                "or leave the flag out"
            )
        old = fields["rollout_log_probs"]
    else:
        # One optimizer step a rollout: the policy that acted is the one of this very forward pass.
        old = fields.get("log_probs", log_probs.detach())
    loss, clipped = policy_loss(log_probs, old, fields["advantages"], options.eps_low, options.eps_high)
    terms = _Terms(
        loss,
        {"pg_loss": loss, "entropy": entropy},
        {"clip_fraction": clipped, "advantage_mean": fields["advantages"]},
    )
    if options.entropy_coef > 0:
        terms.loss = terms.loss + entropy_bonus(entropy, options.entropy_coef)
    if options.kl_coef is not None:
        terms.weighted["kl_loss"] = KL_ESTIMATORS[options.kl_type](log_probs, fields["ref_log_probs"])
        terms.loss = terms.loss + options.kl_coef * terms.weighted["kl_loss"]
    return terms


def step_metrics(sums: dict[str, float], token_sums: dict[str, float], peak: float) -> dict[str, float]:
    """Metrics of one optimizer step, of `LossSums` already added up over all micro-batches and ranks."""
    metrics = {f"train/{name}": value for name, value in sums.items()}
    tokens, compared = max(token_sums["tokens"], 1.0), token_sums.get("compared", 0.0)
    for name, value in token_sums.items():
        if name.startswith("compared_") and compared:
            metrics[f"train/{name.removeprefix('compared_')}"] = value / compared
        elif name not in ("tokens", "compared") and not name.startswith("compared_"):
            metrics[f"train/{name}"] = value / tokens
    if compared:
        metrics["train/logprob_diff_max"] = peak
    return metrics
