"""Losses of tokens: policy losses, the critic's loss, and the weights by which they become one number.

A policy loss is a function of N flat tokens: (log-probs of the policy now, of the old policy, advantages, mask, all
[N]; their sequences; options) -> (loss of each token [N], metrics: values of tokens [N], whose masked mean counts). To
add one: its function, an entry in POLICY_LOSSES below, and one in LOSSES (`estimators.py`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fusionrl.algorithms.divergence import bounded_exp
from fusionrl.algorithms.sequences import Sequences


@dataclass(frozen=True)
class PolicyLossOptions:
    """Constants of the policy losses; each loss reads its own. Defaults are the papers'; flags bound them.

    eps_low, eps_high   clip range 1 - eps_low … 1 + eps_high of the ratio; docs/guides/algorithms.md has each method's
    dual_clip           a negative advantage's loss is at most `dual_clip` times its size; None: no bound
    sapo_tau_pos, sapo_tau_neg    SAPO's temperatures for advantages above 0 and others
    clip_cov_fraction, clip_cov_low, clip_cov_high    Clip-Cov: which share of the tokens, of which covariances
    kl_cov_fraction, kl_cov_coef  KL-Cov: which share of the tokens, and the weight of their penalty
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    clip_cov_fraction: float = 2e-4
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_fraction: float = 2e-4
    kl_cov_coef: float = 1.0


Losses = tuple[Tensor, dict[str, Tensor]]
PolicyLoss = Callable[..., Losses]


METRICS = """
train/ppo_kl | nats | Mean over tokens of log p(old) - log p(policy): an estimate (k1) of how far the policy has moved
    from the one before the first optimizer step. The first step is left out where there are others: there both are
    the same. With a single step it is 0. With --use-rollout-logprobs the old one is the engine's, and all steps
    count. | mode rl
train/clip_fraction | share | Share of tokens whose gradient the clip took away; with gspo and gspo_token share of
    samples (a sample counts by its share of clipped tokens), as their ratio is one of a whole sample. Steps as of
    train/ppo_kl. | policy losses that clip
train/dual_clip_fraction | share | Share of tokens where the dual clip took the gradient away. Steps as of
    train/ppo_kl. | --eps-clip-c
train/gate | 0 … 1 | Mean over tokens of SAPO's gate 4 s (1 - s), s = sigmoid(tau (ratio - 1)): 1 where the ratio is
    1. Steps as of train/ppo_kl. | --policy-loss sapo
train/selected_fraction | share | Share of tokens that the loss chose by their covariance. | --policy-loss clip_cov,
    kl_cov
train/old_not_finite | share | Share of tokens whose old log-prob is -inf or NaN; they have loss 0. | mode rl
critic/value_clip_fraction | share | Share of tokens where --value-clip took the gradient away. Steps as of
    train/ppo_kl.
"""


def clipped_surrogate(ratio: Tensor, advantages: Tensor, options: PolicyLossOptions) -> Losses:
    """PPO's loss of a ratio [N]: `max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))`, with the dual clip at most `-A c`.

    Source: PPO (arXiv 1707.06347), equation 7; the asymmetric range is DAPO's (arXiv 2503.14476), section 3.1; the dual
    clip, for A < 0 only, is from arXiv 1912.09729. The metrics `clip_fraction` and, with a dual clip,
    `dual_clip_fraction` are 1.0 where the clip took the gradient away, else 0.0.
    """
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - options.eps_low, 1.0 + options.eps_high)
    loss = torch.maximum(free, bounded)
    metrics = {"clip_fraction": (bounded > free).to(ratio.dtype)}
    if options.dual_clip is not None:
        ceiling = -advantages * options.dual_clip
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        metrics["dual_clip_fraction"] = over.to(ratio.dtype)
    return loss, metrics


def ppo(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Sequences, options: PolicyLossOptions
) -> Losses:
    """`clipped_surrogate` of each token's own ratio `exp(new - old)`."""
    return clipped_surrogate(bounded_exp(new - old), advantages, options)


def gspo(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Sequences, options: PolicyLossOptions
) -> Losses:
    """PPO's loss with the sequence's ratio `s = exp(mean over its tokens of (new - old))` at each of its tokens.

    Group Sequence Policy Optimization (arXiv 2507.18071), section 4.1. The gradient of each token's loss runs into all
    tokens of its sequence. The paper's objective is the mean over sequences, that is the weights `sequence_mean` of
    `token_weights`.
    """
    log_ratio = sequences.mean(new - old, mask)
    return clipped_surrogate(sequences.spread(bounded_exp(log_ratio)), advantages, options)


def gspo_token(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Sequences, options: PolicyLossOptions
) -> Losses:
    """GSPO's token form: the value of the sequence's ratio, `sg[s] * p / sg[p]`, with the gradient of the token alone.

    Section 4.3; sg stops the gradient. Meant for advantages that differ within a sequence; with equal ones, and equal
    weights, its gradient is that of `gspo`.
    """
    log_ratio = sequences.mean(new.detach() - old, mask)
    ratio = sequences.spread(bounded_exp(log_ratio)) * (new - new.detach()).exp()
    return clipped_surrogate(ratio, advantages, options)


def cispo(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Sequences, options: PolicyLossOptions
) -> Losses:
    """`-sg[clip(r, 1 - eps_low, 1 + eps_high)] * A * log p`: no token's gradient is lost; sg stops the gradient.

    MiniMax-M1 (arXiv 2506.13585), equations 4 and 5. The paper leaves the range open below: eps_low of 1 or more.
    """
    ratio = bounded_exp((new - old).detach())
    weight = ratio.clamp(1.0 - options.eps_low, 1.0 + options.eps_high)
    return -weight * advantages * new, {"clip_fraction": (weight != ratio).to(ratio.dtype)}


def sapo(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Sequences, options: PolicyLossOptions
) -> Losses:
    """`-A * 4 / tau * sigmoid(tau (r - 1))`: a smooth gate in place of the clip, with tau by the advantage's sign.

    Soft Adaptive Policy Optimization (arXiv 2511.20347). The gradient is that of `-A r` times the gate `4 s (1 - s)`,
    s the sigmoid: 1 at r = 1, and less the further the ratio is from it. The metric `gate` is its mean. The paper's
    objective is the mean over sequences.
    """
    ratio = bounded_exp(new - old)
    tau = torch.where(advantages > 0, ratio.new_tensor(options.sapo_tau_pos), ratio.new_tensor(options.sapo_tau_neg))
    sigmoid = torch.sigmoid(tau * (ratio - 1.0))
    return -advantages * sigmoid * 4.0 / tau, {"gate": 4.0 * sigmoid * (1.0 - sigmoid)}


def policy_gradient(new: Tensor, old: Tensor, advantages: Tensor, *_: object) -> Losses:
    """`-A log p`: REINFORCE (Williams, 1992), and the loss of GPG (arXiv 2504.02546).

    GPG differs from REINFORCE by its advantages, and takes the mean over all tokens. Right for samples of the policy
    that is trained; for others, multiply by `importance_weights`.
    """
    return -advantages * new, {}


def gmpo(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, sequences: Sequences, options: PolicyLossOptions
) -> Losses:
    """At each token `-A * exp(mean over the sequence of the clipped log ratios)`, A the mean advantage of the sequence.

    Geometric-Mean Policy Optimization (arXiv 2507.20673). Each token's ratio is clipped by itself, to
    exp(-eps_low) … exp(eps_high) (the range is one of logarithms here) and as in PPO only on the side that its
    advantage wants. The paper's objective is the mean over sequences.
    """
    log_ratio = new - old
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=options.eps_high), log_ratio.clamp(min=-options.eps_low))
    ratio = bounded_exp(sequences.mean(bounded, mask))
    loss = -sequences.mean(advantages, mask) * ratio
    return sequences.spread(loss), {"clip_fraction": (bounded != log_ratio).to(log_ratio.dtype)}


def clip_cov(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
    selected: Tensor,
) -> Losses:
    """PPO's clipped loss, and 0 without gradient at the `selected` [N] bool tokens (`covariance.py`)."""
    loss, metrics = clipped_surrogate(bounded_exp(new - old), advantages, options)
    return torch.where(selected, 0.0, loss), metrics | {"selected_fraction": selected.to(loss.dtype)}


def kl_cov(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: PolicyLossOptions,
    selected: Tensor,
) -> Losses:
    """`-A r`, and at the `selected` [N] bool tokens (`covariance.py`) `kl_cov_coef * |new - old|` on top.

    The divergence from the old policy is that of the authors' program, the size of the log ratio; nothing is clipped.
    """
    loss = -advantages * bounded_exp(new - old)
    penalty = options.kl_cov_coef * (new - old).abs()
    return torch.where(selected, loss + penalty, loss), {"selected_fraction": selected.to(loss.dtype)}


def guarded(loss: PolicyLoss) -> PolicyLoss:
    """`loss`, without the tokens that have mask 0 or an old log-prob that is -inf or NaN, as an engine may give.

    They have loss 0 and no gradient, and sequences are taken without them. Metrics are joined by `old_not_finite`, 1.0
    for a token left out so, and by `ppo_kl`, the estimate `old - new` of KL(old || new), 0.0 for such a token. A NaN of
    the trained policy itself is not due to an engine: it stays in, and the loss is NaN.
    """

    @functools.wraps(loss)
    def checked(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *rest: object, **extra: Tensor) -> Losses:
        finite = old.isfinite() | ~new.isfinite()
        used = finite & (mask > 0)
        # Values left out are replaced before use: NaN times a zero gradient would be NaN.
        new, old, advantages = (torch.where(used, values, 0.0) for values in (new, old, advantages))
        losses, metrics = loss(new, old, advantages, mask * used, *rest, **extra)
        metrics = {name: torch.where(used, value, 0.0).detach() for name, value in metrics.items()}
        metrics["ppo_kl"] = (old - new).detach()
        metrics["old_not_finite"] = (~finite).to(new.dtype)
        return torch.where(used, losses, 0.0), metrics

    return checked


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": guarded(ppo),
    "gspo": guarded(gspo),
    "gspo_token": guarded(gspo_token),
    "cispo": guarded(cispo),
    "sapo": guarded(sapo),
    "gpg": guarded(policy_gradient),
    "gmpo": guarded(gmpo),
    "clip_cov": guarded(clip_cov),
    "kl_cov": guarded(kl_cov),
}


def token_weights(
    mask: np.ndarray,
    kind: str,
    num_tokens: float,
    num_samples: int,
    constant: float | None = None,
    attempt_tokens: float | None = None,
) -> np.ndarray:
    """Weights of one sample's tokens: the loss is their sum of `weight * loss` over all samples of the optimizer step.

        token_mean      mask / num_tokens                        DAPO (arXiv 2503.14476), section 3.3
        sequence_mean   mask / (num_samples * attempt_tokens)    GRPO (arXiv 2402.03300), equation 3
        constant        mask / (num_samples * constant)          Dr. GRPO (arXiv 2503.20783), section 3.2

    The counts are those of the whole step over all ranks, so no split changes the loss. A sample without trained tokens
    (removed by a filter, masked, failed) weighs nothing and still counts in num_samples: in the papers' 1/G, G is the
    number of answers that were sampled, whatever becomes of them.

    mask            [L] of the sample's response; 0 where a token is not trained on
    num_tokens      the sum of all masks
    num_samples     attempts of the step: one sample each, or several that share a `rollout_id`
    constant        the same length for all samples, such as the longest response allowed
    attempt_tokens  the sum of the masks of all samples of the attempt; None: of this one

    Returns [L] float64.
    """
    mask = np.asarray(mask, np.float64)
    if kind == "token_mean":
        return mask / max(num_tokens, 1.0)
    if kind == "sequence_mean":
        return mask / max(num_samples * float(mask.sum() if attempt_tokens is None else attempt_tokens), 1e-12)
    assert kind == "constant" and constant, f"{kind}: the flags' check asks for a length"
    return mask / (max(num_samples, 1) * constant)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """`max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2` of each token.

    Source: the clip is from OpenAI Baselines' PPO2; arXiv 2005.12729, section 3, describes it. `old_values` [N] are of
    the critic when the advantages were computed, `returns` [N] what the values should be; clip None: no bound.

    Returns (loss [N], metrics [N]): `value_clip_fraction` is 1.0 where the clip took the gradient away, else 0.0.
    """
    free = (values - returns) ** 2
    if clip is None:
        return 0.5 * free, {"value_clip_fraction": torch.zeros_like(free)}
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns) ** 2
    return 0.5 * torch.maximum(free, bounded), {"value_clip_fraction": (bounded > free).to(free.dtype).detach()}
