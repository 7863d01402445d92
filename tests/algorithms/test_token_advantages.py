"""Scan, GAE, returns and rewards of tokens, against plain recursions over Python's floats."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionrl.algorithms.divergence import reverse_kl_gap
from fusionrl.algorithms.sequences import Responses
from fusionrl.algorithms.token_advantages import (
    discounted_returns,
    discounted_sums,
    gae,
    kl_rewards,
    score_rewards,
)

# Empty, one token, on both sides of a chunk's 128, more chunks than one round takes.
LENGTHS = [0, 1, 127, 128, 129, 0, 300, 128 * 128 + 5, 2]
STARTS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]


def draw(seed: int, size: int) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=size))


def ragged(seed: int, share: float = 0.6) -> Responses:
    """Responses with tools' answers in them; the last has no trained token."""
    mask = np.random.default_rng(seed).random(sum(LENGTHS)) < share
    mask[-2:] = False
    return Responses(torch.tensor(mask), torch.tensor(LENGTHS))


def samples(responses: Responses) -> list[list[int]]:
    """For each sample, where its trained tokens stand."""
    parts = zip(STARTS, responses.mask.split(LENGTHS), strict=True)
    return [(start + part.nonzero()[:, 0]).tolist() for start, part in parts]


def trained_rewards(seed: int, responses: Responses) -> Tensor:
    return torch.where(responses.mask, draw(seed, responses.mask.numel()), 0.0)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 0.999, 1.0])
def test_discounted_sums_equal_the_recursion(decay: float) -> None:
    values = draw(0, sum(LENGTHS))
    got, want = discounted_sums(values, torch.tensor(LENGTHS), decay), []
    for part in values.split(LENGTHS):
        carry, sums = 0.0, []
        for x in reversed(part.tolist()):
            carry = x + decay * carry
            sums.append(carry)
        want += sums[::-1]
    expected = torch.tensor(want, dtype=torch.float64)
    assert float((got - expected).norm() / expected.norm()) < 1e-12
    assert (got - expected).abs().max() < 1e-12 * expected.abs().max()


def plain_gae(
    rewards: Tensor, values: Tensor, responses: Responses, gamma: float, lam: float, after: list[float]
) -> tuple[Tensor, Tensor]:
    reward, value = rewards.tolist(), values.tolist()
    advantages, returns = [0.0] * len(value), [0.0] * len(value)
    for tokens, last in zip(samples(responses), after, strict=True):
        advantage, following = 0.0, last
        for t in reversed(tokens):
            advantage = reward[t] + gamma * following - value[t] + gamma * lam * advantage
            following = value[t]
            advantages[t], returns[t] = advantage, advantage + value[t]
    return torch.tensor(advantages, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_gae_equals_the_recursion_over_trained_tokens(gamma: float, lam: float, bootstrap: bool) -> None:
    responses = ragged(1)
    rewards, values = trained_rewards(2, responses), draw(3, sum(LENGTHS))
    values[~responses.mask] = math.nan  # a critic may say anything of a tool's answer
    last = draw(4, len(LENGTHS)) if bootstrap else None
    got = gae(rewards, values, responses, gamma, lam, last)
    want = plain_gae(rewards, values, responses, gamma, lam, [0.0] * len(LENGTHS) if last is None else last.tolist())
    for g, w in zip(got, want, strict=True):
        w = torch.where(responses.mask, w, 0.0)
        assert float((g - w).norm() / w.norm()) < 1e-12
        assert not g[~responses.mask].any()


@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_discounted_returns_equal_a_double_loop(gamma: float) -> None:
    responses = ragged(5, 0.02)
    rewards = trained_rewards(6, responses)
    got = discounted_returns(rewards, responses, gamma)
    want = torch.zeros_like(rewards)
    for tokens in samples(responses):
        for i, t in enumerate(tokens):
            want[t] = sum(gamma**j * float(rewards[s]) for j, s in enumerate(tokens[i:]))
    assert float((got - want).norm() / want.norm()) < 1e-12


def test_score_stands_on_the_last_trained_token() -> None:
    responses = Responses(torch.tensor([1, 1, 0, 0, 0, 1.0]), torch.tensor([3, 0, 2, 1]))
    scores = torch.tensor([2.0, 3.0, 4.0, 5.0])
    assert score_rewards(scores, responses).tolist() == [0.0, 2.0, 0.0, 0.0, 0.0, 5.0]
    assert responses.spread(scores).tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 5.0]
    assert responses.mean(torch.arange(6.0), "x").nan_to_num(-1.0).tolist() == [0.5, -1.0, -1.0, 5.0]


def test_kl_has_its_price_at_trained_tokens_and_one_that_overflows_is_refused() -> None:
    policy, reference, mask = draw(13, 60), draw(14, 60) * 2, torch.arange(60) % 3 != 0
    rewards, _ = kl_rewards(policy, reference, mask, "k2", 0.3)
    assert torch.allclose(rewards, torch.where(mask, -0.15 * (policy - reference) ** 2, 0.0), rtol=1e-12)
    with pytest.raises(ValueError, match="--kl-coef-type k3: .* up to 120 nats apart.*low_var_kl"):
        kl_rewards(torch.tensor([-120.0]), torch.tensor([0.0]), torch.ones(1), "k3", 0.1)


def test_reverse_kl_is_the_gradient_of_the_kl() -> None:
    """By enumeration: the expected policy gradient with these advantages is minus the gradient of KL(p || q)."""
    logits = draw(18, 9).requires_grad_()
    log_p, log_q = logits.log_softmax(0), draw(19, 9).log_softmax(0)
    (want,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    advantages, _ = reverse_kl_gap(log_p.detach(), log_q, torch.ones(9))
    (got,) = torch.autograd.grad((log_p.exp().detach() * advantages * log_p).sum(), logits)
    assert torch.allclose(got, -want, rtol=1e-12, atol=1e-14)


TWO = Responses(torch.tensor([1, 1, 1, 0]), torch.tensor([2, 2]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: gae(torch.zeros(4), torch.tensor([0, 0, math.nan, 0]), TWO, 1.0, 1.0),
            "value nan at response token 0 of sample 1",
        ),
        (
            lambda: gae(torch.zeros(4), torch.zeros(4), TWO, 1.0, 1.0, torch.tensor([0, math.inf])),
            "after the last token is not finite: inf",
        ),
        (
            lambda: discounted_returns(torch.tensor([0, math.inf, 0, 0]), TWO, 1.0),
            "reward inf at response token 1 of sample 0",
        ),
        (
            lambda: discounted_returns(torch.tensor([0, 0, 0, 1.0]), TWO, 1.0),
            "1 rewards stand on tokens that are not trained on",
        ),
        (lambda: score_rewards(torch.tensor([0, math.nan]), TWO), "reward nan of sample 1 is not finite"),
    ],
)
def test_refuses_what_would_become_nan(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
