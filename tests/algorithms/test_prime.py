"""PRIME's rewards, advantages and loss, against the paper's formulas in loops."""

import math
import statistics

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionrl.algorithms.sequences import Responses
from fusionrl.algorithms.stages import SampleBatch, leave_one_out, rloo
from fusionrl.algorithms.token_advantages import implicit_reward_loss, implicit_rewards, prime_advantages

LENGTHS = [5, 9, 1, 4, 0, 6, 3, 8]
GROUPS = np.array([0, 1, 0, 1, 0, 0, 1, 2])
SCORES = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
BETA = 0.05


def draw(seed: int, size: int = sum(LENGTHS)) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=size))


def responses(seed: int) -> Responses:
    """Sample 4 is empty and sample 6 fully masked."""
    mask = np.random.default_rng(seed).random(sum(LENGTHS)) < 0.7
    mask[5 + 9] = True
    mask[-11:-8] = False
    return Responses(torch.tensor(mask), torch.tensor(LENGTHS))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_advantages_equal_the_papers_formula(gamma: float) -> None:
    batch = responses(0)
    rewards, excluded = implicit_rewards(draw(1), draw(2), batch.mask, BETA)
    assert int(excluded) == 0
    baselines = leave_one_out(batch.mean(rewards, "process reward").numpy(), GROUPS)
    outcome = rloo(SampleBatch(SCORES, GROUPS))
    got = prime_advantages(rewards, torch.tensor(baselines), torch.tensor(outcome), batch, gamma, 2.0, 3.0)

    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    tokens = [[t for t in range(starts[i], starts[i + 1]) if batch.mask[t]] for i in range(len(LENGTHS))]
    ratio = [BETA * (float(p) - float(q)) for p, q in zip(draw(1), draw(2), strict=True)]
    means = [statistics.fmean(ratio[t] for t in own) if own else None for own in tokens]
    want = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    for i, own in enumerate(tokens):
        others = [j for j in range(len(LENGTHS)) if GROUPS[j] == GROUPS[i] and j != i]
        known = [m for j in others if (m := means[j]) is not None]
        baseline = statistics.fmean(known) if known else means[i]
        second = SCORES[i] - statistics.fmean(SCORES[others]) if others else 0.0
        for at, t in enumerate(own):
            first = sum(gamma**s * (ratio[u] - baseline) for s, u in enumerate(own[at:]))
            want[t] = 2.0 * first + 3.0 * second
    assert float((got - want).norm() / want.norm()) < 1e-12
    # Alone in its group, a sample's process rewards sum to nothing over its response where nothing is discounted.
    assert gamma < 1.0 or float(got[tokens[7][0]]) == pytest.approx(0.0, abs=1e-14)


def sums(log_probs: Tensor, reference: Tensor, batch: Responses, index: Tensor) -> Tensor:
    rewards, _ = implicit_rewards(log_probs, reference, batch.mask, BETA)
    return torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, index, rewards)


def test_loss_equals_the_cross_entropy_and_its_gradient() -> None:
    batch, labels = responses(5), torch.tensor(SCORES)
    index = torch.arange(len(LENGTHS)).repeat_interleave(batch.lengths)
    log_probs, reference = (draw(6) * 9).requires_grad_(), draw(7) * 9
    got = implicit_reward_loss(sums(log_probs, reference, batch, index), labels)
    for i, own in enumerate(torch.split(BETA * (log_probs.detach() - reference) * batch.mask, LENGTHS)):
        chance = 1.0 / (1.0 + math.exp(-float(own.sum())))
        want = -(SCORES[i] * math.log(chance) + (1 - SCORES[i]) * math.log(1 - chance))
        assert float(got.detach()[i]) == pytest.approx(want, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: implicit_reward_loss(sums(x, reference, batch, index), labels), (log_probs,)
    )


def test_loss_of_extremes_is_finite_and_of_an_empty_sequence_is_log_two() -> None:
    rewards = torch.tensor([1e4, -1e4, 0.0], dtype=torch.float64, requires_grad=True)
    losses = implicit_reward_loss(rewards, torch.tensor([0.0, 0.0, 1.0]))
    assert losses.tolist() == [1e4, 0.0, pytest.approx(math.log(2))]


def test_refuses_a_label_that_is_no_outcome() -> None:
    for label in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"outcome {label} must be from 0"):
            implicit_reward_loss(torch.zeros(2), torch.tensor([1.0, label]))
    with pytest.raises(ValueError, match="process reward inf at response token 0 of sample 0"):
        prime_advantages(
            torch.tensor([math.inf]), torch.zeros(1), torch.zeros(1), Responses(torch.ones(1), torch.ones(1).long())
        )
