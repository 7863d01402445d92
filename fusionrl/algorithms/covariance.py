"""Clip-Cov and KL-Cov: the few tokens whose log-prob and advantage covary most are held back, for entropy's sake.

Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617, section 4.
Which tokens is decided once for a whole mini-batch, by `select`; the losses take the choice as `selected`.
"""

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


def select(
    policy_loss: str,
    log_probs: np.ndarray,
    advantages: np.ndarray,
    mask: np.ndarray,
    sample_index: np.ndarray,
    position: np.ndarray,
    seed: int,
    options: PolicyLossOptions,
    clipped: np.ndarray | None = None,
) -> np.ndarray:
    """The tokens that `policy_loss` holds back, at least one: Clip-Cov detaches them, KL-Cov penalises them.

        clip_cov  the share clip_cov_fraction, at random, of those with a covariance in clip_cov_low … clip_cov_high
        kl_cov    the share kl_cov_fraction with the highest covariance, of equal ones by sample and position

    log_probs, advantages  [N] of all tokens of the mini-batch, over all ranks, under the policy before the step
    mask          [N]; a token with mask 0, or whose log-prob is not finite, is neither counted nor chosen
    sample_index  [N] any number that names the token's sample in the whole run
    position      [N] where in its sample the token stands
    clipped       [N] tokens whose gradient PPO's clip takes anyway: counted, and not chosen by Clip-Cov

    Returns [N] bool, the same for any order of the tokens.
    """
    # Sorted by sample and position, so that the means over the tokens are the same to the last bit.
    order = np.lexsort((position, sample_index))
    order = order[(np.asarray(mask)[order] > 0) & np.isfinite(log_probs[order])]
    selected = np.zeros(len(log_probs), dtype=bool)
    if not order.size:
        return selected
    log_probs, advantages = (np.asarray(values, np.float64)[order] for values in (log_probs, advantages))
    covariance = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    if policy_loss == "kl_cov":
        fraction, candidates, rank = options.kl_cov_fraction, order, -covariance
    else:
        within = (covariance > options.clip_cov_low) & (covariance < options.clip_cov_high)
        if clipped is not None:
            within &= ~np.asarray(clipped, bool)[order]
        fraction, candidates = options.clip_cov_fraction, order[within]
        rank = token_numbers(seed, sample_index[candidates], position[candidates])
    selected[candidates[np.argsort(rank, kind="stable")[: max(int(fraction * order.size), 1)]]] = True
    return selected
