"""Names of `slime.utils.ppo_utils` and `slime.backends.megatron_utils.cp_utils`, for functions in the trainers.

Such a function gets whole responses on every context-parallel rank, so there is nothing to gather or to slice: one
that was written for a rank's part of them runs unchanged, with the same values. Shapes are [t], values of tokens.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fusionrl.algorithms.divergence import KL_ESTIMATORS, LOW_VAR_BOUND

Values = TypeVar("Values", Tensor, list[float])


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Return an estimate of KL(policy || base) for each token; see `fusionrl.algorithms.divergence`.

    importance_ratio  probability of the policy over that of the one that drew the token, for an unbiased estimate

    Raises:
        ValueError: an unknown estimator.
    """
    if kl_loss_type not in KL_ESTIMATORS:
        raise ValueError(f"kl_loss_type={kl_loss_type!r}: choose one of {', '.join(KL_ESTIMATORS)}")
    if importance_ratio is None:
        return KL_ESTIMATORS[kl_loss_type](log_probs.float(), log_probs_base.float())
    is_bounded = kl_loss_type == "low_var_kl"
    estimator = KL_ESTIMATORS["k3" if is_bounded else kl_loss_type]
    product = importance_ratio * estimator(log_probs.float(), log_probs_base.float())
    return product.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if is_bounded else product


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss of each token, and 1 where the clip decided it (arXiv 1707.06347, equation 7).

    ppo_kl      old log-prob minus new log-prob
    eps_clip_c  dual clip: a negative advantage's loss is at most so many times its size (arXiv 1912.09729)

    Raises:
        ValueError: a dual clip that is not above 1.
    """
    ratio = (-ppo_kl).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        if eps_clip_c <= 1.0:
            raise ValueError(f"eps_clip_c={eps_clip_c} must be above 1, or it would also bound the ratio 1")
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (clipped > plain).float()


# ------------------------------------------------------------------------------------------------ cp_utils
def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int, *layout: object) -> Tensor:
    """Return a response's values unchanged, [response_length]; miles also passes the layout."""
    assert len(tensor) == response_length, f"{len(tensor)} values for {response_length} response tokens"
    return tensor


def slice_log_prob_with_cp(log_prob: Values, total_length: int, response_length: int, *layout: object) -> Values:
    """Return a response's values as they are, [response_length]."""
    assert len(log_prob) == response_length, f"{len(log_prob)} values for {response_length} response tokens"
    return log_prob


def slice_with_cp(tokens: Tensor, pad_value: float | Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return a sequence as it is."""
    return tokens


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    sample_denoms: Sequence[Tensor] | Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Return a function of values of all responses, [sum of lengths]: the sum of the samples' masked means.

    sample_denoms             what each sample's sum is divided by; default: its number of trained tokens
    calculate_per_token_loss  nothing is divided: the sum over trained tokens
    """
    denominators = [mask.sum() for mask in loss_masks] if sample_denoms is None else list(sample_denoms)

    def reduced(values: Tensor) -> Tensor:
        parts = values.split(list(response_lengths), dim=0)
        sums = [(part * mask).sum() for part, mask in zip(parts, loss_masks, strict=True)]
        if not calculate_per_token_loss:
            sums = [total / torch.clamp_min(count, 1) for total, count in zip(sums, denominators, strict=True)]
        return torch.stack(sums).sum()

    return reduced
