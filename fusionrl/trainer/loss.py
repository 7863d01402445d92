"""The loss of a micro-batch, and its metrics as sums that are right when added up over ranks.

One denominator: the loss is `sum_t weights_t * l_t`, where `weights` already hold the global count of the
optimizer step (see `batch.py`). So losses and gradients are sums over micro-batches and ranks, and no split
changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusionrl.algorithms.entropy import entropy_bonus
from fusionrl.algorithms.kl import KL_ESTIMATORS, k3
from fusionrl.algorithms.policy_loss import policy_loss
from fusionrl.algorithms.sft import sft_loss
from fusionrl.config.config import Config
from fusionrl.trainer.batch import MicroBatch

# Added up over micro-batches and ranks. `tokens` and `compared` are the denominators of means over tokens.
SUMS = (
    "loss",
    "pg_loss",
    "kl_loss",
    "entropy",
    "clip_fraction",
    "advantage_mean",
    "tokens",
    "logprob_diff",
    "logprob_k3",
    "compared",
)
# Means over all tokens that are trained on, whatever the loss's own weights.
TOKEN_MEANS = ("clip_fraction", "advantage_mean")


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

    @classmethod
    def from_config(cls, config: Config) -> LossOptions:
        """The options of `config`."""
        algorithm = config.algorithm
        return cls(
            mode="sft" if config.run.mode == "sft" else "rl",
            eps_low=algorithm.eps_clip,
            eps_high=algorithm.eps_clip_high if algorithm.eps_clip_high is not None else algorithm.eps_clip,
            kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else None,
            kl_type=algorithm.kl_loss_type,
            entropy_coef=algorithm.entropy_coef,
            use_rollout_log_probs=algorithm.use_rollout_logprobs,
        )


@dataclass
class LossSums:
    """Metrics of a micro-batch, fp64: `sums` [len(SUMS)] to be added up, `peak` [1] whose maximum counts.

    finite  [N] bool: whether each token's loss is; looked at only where a step is skipped
    batch   the micro-batch
    """

    sums: Tensor
    peak: Tensor
    finite: Tensor | None = None
    batch: MicroBatch | None = None

    def bad_samples(self) -> list[int]:
        """The shard's samples with a token whose loss is not finite."""
        if self.finite is None or self.batch is None:
            return []
        ends = torch.tensor(self.batch.response_lengths).cumsum(0)
        tokens = self.batch.responses[~self.finite.cpu()]
        positions = torch.searchsorted(ends, tokens, right=True).unique()
        return [self.batch.samples[position] for position in positions.tolist()]


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
    values: dict[str, Tensor] = {"tokens": batch.loss_mask.sum()}
    if options.mode == "sft":
        token_loss = sft_loss(log_probs)
    else:
        token_loss, parts = _policy_terms(log_probs, entropy, batch, options)
        values |= parts
    loss = (batch.weights * token_loss).sum()
    values["loss"] = loss.detach()
    peak = log_probs.new_zeros(1, dtype=torch.float64)
    if options.mode == "rl" and compare and batch.rollout_log_probs is not None:
        reference = batch.old_log_probs if batch.old_log_probs is not None else log_probs.detach()
        difference = (reference - batch.rollout_log_probs).abs() * batch.loss_mask
        values["logprob_diff"] = difference.sum()
        values["logprob_k3"] = (k3(batch.rollout_log_probs, reference) * batch.loss_mask).sum()
        values["compared"] = batch.loss_mask.sum()
        if difference.numel():
            peak = difference.max().double().reshape(1)
    zero = log_probs.new_zeros((), dtype=torch.float64)
    sums = torch.stack([values[name].detach().double() if name in values else zero for name in SUMS])
    return loss, LossSums(sums, peak, token_loss.detach().isfinite(), batch)


def _policy_terms(
    log_probs: Tensor, entropy: Tensor, batch: MicroBatch, options: LossOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    assert batch.advantages is not None
    if options.use_rollout_log_probs:
        if batch.rollout_log_probs is None and batch.samples:
            raise ValueError(
                "--use-rollout-logprobs: the rollout has no log-probs; let the engines return them, "
                "or leave the flag out"
            )
        old = batch.rollout_log_probs if batch.samples else log_probs.detach()
    else:
        # One optimizer step a rollout: the policy that acted is the one of this very forward pass.
        old = batch.old_log_probs if batch.old_log_probs is not None else log_probs.detach()
    loss, clipped = policy_loss(log_probs, old, batch.advantages, options.eps_low, options.eps_high)
    values = {
        "pg_loss": (batch.weights * loss).sum(),
        "entropy": (batch.weights * entropy).sum(),
        "clip_fraction": (batch.loss_mask * clipped).sum(),
        "advantage_mean": (batch.loss_mask * batch.advantages).sum(),
    }
    if options.entropy_coef > 0:
        loss = loss + entropy_bonus(entropy, options.entropy_coef)
    if options.kl_coef is not None:
        assert batch.ref_log_probs is not None or not batch.samples, "the reference's forward pass comes first"
        reference = batch.ref_log_probs if batch.ref_log_probs is not None else log_probs.detach()
        kl = KL_ESTIMATORS[options.kl_type](log_probs, reference)
        values["kl_loss"] = (batch.weights * kl).sum()
        loss = loss + options.kl_coef * kl
    return loss, values


def step_metrics(sums: Tensor, peak: Tensor, options: LossOptions) -> dict[str, float]:
    """Metrics of one optimizer step, of `LossSums` already added up over all micro-batches and ranks."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    metrics = {"train/loss": total["loss"]}
    if options.mode == "sft":
        return metrics
    metrics["train/pg_loss"] = total["pg_loss"]
    metrics["train/entropy"] = total["entropy"]
    if options.kl_coef is not None:
        metrics["train/kl_loss"] = total["kl_loss"]
    metrics |= {f"train/{name}": total[name] / tokens for name in TOKEN_MEANS}
    if total["compared"]:
        metrics["train/logprob_diff_mean"] = total["logprob_diff"] / total["compared"]
        metrics["train/logprob_k3"] = total["logprob_k3"] / total["compared"]
        metrics["train/logprob_diff_max"] = float(peak)
    return metrics
