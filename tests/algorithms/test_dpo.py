"""DPO against its formula in a loop, and its gradient over sequences, splits and ranks."""

from __future__ import annotations

import math

import pytest
import torch

from fusionrl.algorithms.aggregation import token_weights
from fusionrl.algorithms.dpo import dpo_loss, dpo_token_losses
from fusionrl.algorithms.sequences import Sequences
from tests.algorithms.flat import TwoRanks, relative

LENGTHS = (5, 3, 2, 6, 4, 1, 3, 2)
CHOSEN, REJECTED = torch.tensor([0, 3, 4, 7]), torch.tensor([1, 2, 6, 5])


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequences]:
    """log_probs, reference, mask, weights [N] of four pairs; every sequence has a trained token."""
    sequences = Sequences.of_lengths(LENGTHS)
    size = len(sequences.index)
    mask = (torch.arange(size) % 4 != 1).double()
    mask[torch.tensor(LENGTHS).cumsum(0) - 1] = 1
    parts = mask.split(LENGTHS)
    weights = [torch.from_numpy(token_weights(m.numpy(), "sequence_mean", 0.0, len(LENGTHS))) for m in parts]
    return normal(0, size) - 2, normal(1, size) - 2, mask, torch.cat(weights), sequences


def pair_loss(h: float, beta: float, smoothing: float) -> float:
    def log_sigmoid(x: float) -> float:
        return -math.log(1 + math.exp(-x))

    return -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_of_pairs(smoothing: float):
    sums = list(normal(2, 4, 6))
    loss, metrics = dpo_loss(*sums, beta=0.3, label_smoothing=smoothing)
    for p in range(6):
        chosen, rejected = (float(sums[i][p] - sums[i + 2][p]) for i in range(2))
        assert float(loss[p]) == pytest.approx(pair_loss(chosen - rejected, 0.3, smoothing), rel=1e-12)
        assert float(metrics["chosen_reward"][p]) == pytest.approx(0.3 * chosen)
        assert float(metrics["rejected_reward"][p]) == pytest.approx(0.3 * rejected)
        assert float(metrics["reward_accuracy"][p]) == float(chosen > rejected)
    assert 0 < metrics["reward_accuracy"].sum() < 6

    def total(*x: torch.Tensor) -> torch.Tensor:
        return dpo_loss(*x, beta=0.3, label_smoothing=smoothing)[0].sum()

    assert torch.autograd.gradcheck(total, [value.clone().requires_grad_() for value in sums])


def test_tokens_have_the_mean_over_pairs_and_its_gradient():
    x, reference, mask, weights, sequences = answers()
    x.requires_grad_()
    losses, metrics = dpo_token_losses(x, reference, mask, sequences, CHOSEN, REJECTED, 0.3, 0.1)
    (weights * losses).sum().backward()
    ratio = [
        sum(float((x.detach() - reference)[i]) for i in range(len(mask)) if mask[i] and sequences.index[i] == s)
        for s in range(8)
    ]
    total = 0.0
    for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True):
        h = ratio[c] - ratio[r]
        total += pair_loss(h, 0.3, 0.1) / 4
        slope = 0.3 * (1 / (1 + math.exp(-0.3 * h)) - 0.9) / 4  # of the pair's loss by h, over four pairs
        for s, sign in ((c, 1), (r, -1)):
            own = x.grad[sequences.index == s]
            assert own.tolist() == pytest.approx((sign * slope * mask[sequences.index == s]).tolist(), rel=1e-12)
            margin = metrics["reward_margin"][(sequences.index == s) & (mask > 0)]
            assert margin.tolist() == pytest.approx([0.3 * h] * len(margin))
    assert float((weights * losses).detach().sum()) == pytest.approx(total, rel=1e-12)
    assert not metrics["pair_excluded"].any()


def test_no_split_of_pairs_or_tokens_changes_the_gradient():
    x, reference, mask, weights, sequences = answers()
    index = sequences.index

    def gradient(tokens, chosen, rejected, reduce=None):
        own = x[tokens].clone().requires_grad_()
        here = Sequences(index[tokens], 8, reduce)
        losses, _ = dpo_token_losses(own, reference[tokens], mask[tokens], here, chosen, rejected)
        (weights[tokens] * losses).sum().backward()
        return own.grad

    whole = gradient(slice(None), CHOSEN, REJECTED)
    split = torch.zeros_like(whole)
    for pairs in ([2], [0, 3], [1]):
        tokens = torch.isin(index, torch.cat([CHOSEN[pairs], REJECTED[pairs]]))
        split[tokens] = gradient(tokens, CHOSEN[pairs], REJECTED[pairs])
    assert relative(split, whole) < 1e-9
    owner = torch.arange(len(mask)) % 2
    parts = TwoRanks().run(lambda rank, reduce: gradient(owner == rank, CHOSEN, REJECTED, reduce))
    for rank in range(2):
        split[owner == rank] = parts[rank]
    assert relative(split, whole) < 1e-9


def test_a_pair_that_cannot_be_compared_is_left_out_and_counted():
    x, reference, mask, weights, sequences = answers()
    mask[sequences.index == 3] = 0  # the chosen answer of the second pair has no trained token
    reference[sequences.index == 5] = -math.inf  # the rejected one of the fourth
    x.requires_grad_()
    losses, metrics = dpo_token_losses(x, reference, mask, sequences, CHOSEN, REJECTED)
    (weights * losses).sum().backward()
    out = torch.isin(sequences.index, torch.tensor([3, 2, 5, 7]))
    assert losses.isfinite().all() and not losses[out].any() and not x.grad[out].any()
    assert x.grad[~out & (mask > 0)].all()
    assert torch.equal(metrics["pair_excluded"], (out & (mask > 0)).double())
    assert not metrics["reward_accuracy"][out].any()


def test_mistakes():
    pair = [torch.zeros(1)] * 4
    with pytest.raises(ValueError, match="beta 0.0 must be above 0"):
        dpo_loss(*pair, beta=0.0)
    with pytest.raises(ValueError, match="label smoothing 0.5 must be"):
        dpo_loss(*pair, label_smoothing=0.5)
    x, reference, mask, _, sequences = answers()
    with pytest.raises(ValueError, match="one pair only"):
        dpo_token_losses(x, reference, mask, sequences, torch.tensor([0, 1]), torch.tensor([2, 0]))
