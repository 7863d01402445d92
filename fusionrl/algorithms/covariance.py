"""Clip-Cov and KL-Cov: the few tokens whose log-prob and advantage covary most are held back, for entropy's sake.

Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617, section 4.
Which tokens is decided once for a whole mini-batch, by `SELECTORS`; the losses take the choice as `selected`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fusionrl.algorithms.policy_losses import PolicyLossOptions


def token_numbers(seed: int, sample_index: np.ndarray, position: np.ndarray) -> np.ndarray:
    """A pseudo-random number of each token that depends on nothing but these three. [N], [N] -> [N] uint64

    SplitMix64's mixing function (Steele, Lea, Flood, OOPSLA 2014) of seed, then sample, then position.
    """
    state = np.full(len(sample_index), seed % 2**64, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (sample_index, position):
            state = _mix(state ^ _mix(np.asarray(part).astype(np.uint64)))
    return state


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def select_clip_cov(
    log_probs: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    sample_index: np.ndarray,
    position: np.ndarray,
    seed: int,
    options: PolicyLossOptions,
    clipped: np.ndarray | None = None,
) -> np.ndarray:
    """The tokens that Clip-Cov detaches: at random, of those with a covariance in clip_cov_low … clip_cov_high.

    Args:
        log_probs, advantages: [N] of all tokens of the mini-batch, over all ranks, under the policy before the step.
        mask: [N]; a token with mask 0, or whose log-prob is not finite, is neither counted nor chosen.
        sample_index: [N] the sample that a token is of; any number that names it in the whole run.
        position: [N] where in its sample the token stands.
        seed, options: of the choice: the share of the tokens (of them at least one), and the covariances.
        clipped: [N] tokens whose gradient PPO's clip takes anyway: counted, not chosen.

    Returns:
        [N] bool, the same for any order of the tokens.
    """
    order, covariance = _covariances(log_probs, advantages, mask, sample_index, position)
    within = (covariance > options.clip_cov_low) & (covariance < options.clip_cov_high)
    if clipped is not None:
        within &= ~np.asarray(clipped, bool)[order]
    candidates = order[within]
    numbers = token_numbers(seed, sample_index[candidates], position[candidates])
    count = max(int(options.clip_cov_fraction * order.size), 1)
    return _mask_of(candidates[np.argsort(numbers, kind="stable")[:count]], len(log_probs))


def select_kl_cov(
    log_probs: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    sample_index: np.ndarray,
    position: np.ndarray,
    seed: int,
    options: PolicyLossOptions,
    clipped: np.ndarray | None = None,
) -> np.ndarray:
    """The tokens that KL-Cov penalises: the share kl_cov_fraction (at least one) with the highest covariance.

    Arguments and result as of `select_clip_cov`; `seed` and `clipped` change nothing. Of equal covariances the first
    token in order of sample and position is taken.
    """
    order, covariance = _covariances(log_probs, advantages, mask, sample_index, position)
    count = max(int(options.kl_cov_fraction * order.size), 1)
    return _mask_of(order[np.argsort(-covariance, kind="stable")[:count]], len(log_probs))


def _covariances(
    log_probs: np.ndarray, advantages: np.ndarray, mask: np.ndarray, sample_index: np.ndarray, position: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens that count, `(log p - mean log p) (A - mean A)` of each, float64).

    They are sorted by sample and position: the means over them are then the same to the last bit.
    """
    order = np.lexsort((position, sample_index))
    order = order[(np.asarray(mask)[order] > 0) & np.isfinite(log_probs[order])]
    if not order.size:
        return order, np.zeros(0)
    log_probs, advantages = (np.asarray(values, np.float64)[order] for values in (log_probs, advantages))
    return order, (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def _mask_of(chosen: np.ndarray, size: int) -> np.ndarray:
    selected = np.zeros(size, dtype=bool)
    selected[chosen] = True
    return selected


SELECTORS: dict[str, Callable[..., np.ndarray]] = {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov}
