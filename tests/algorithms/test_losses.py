"""Policy loss, KL estimators, SFT loss and entropy bonus against loops in Python's float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fusionrl.algorithms.entropy import entropy_bonus
from fusionrl.algorithms.kl import KL_ESTIMATORS
from fusionrl.algorithms.policy_loss import policy_loss
from fusionrl.algorithms.sft import sft_loss


def draws(seed, *scales, count=200):
    random = np.random.default_rng(seed)
    return [torch.tensor(scale * random.normal(size=count), dtype=torch.float64) for scale in scales]


def test_policy_loss_and_its_gradient():
    new, old, advantages = draws(0, 0.4, 0.4, 1.0)
    new.requires_grad_()
    loss, clipped = policy_loss(new, old, advantages, 0.1, 0.3)
    loss.sum().backward()
    fired = 0
    for i in range(len(new)):
        ratio, a = math.exp(float(new.detach()[i] - old[i])), float(advantages[i])
        bounded = min(max(ratio, 0.9), 1.3)
        assert float(loss.detach()[i]) == pytest.approx(max(-a * ratio, -a * bounded), rel=1e-12)
        # The gradient stops where the ratio has left the range in the direction the advantage wants.
        outside = (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.9)
        assert float(clipped[i]) == float(outside)
        assert float(new.grad[i]) == pytest.approx(0.0 if outside else -a * ratio, rel=1e-12)
        fired += outside
    assert 20 < fired < 180


def test_policy_loss_of_the_acting_policy_is_the_policy_gradient():
    new, advantages = draws(1, 1.0, 1.0)
    new.requires_grad_()
    loss, clipped = policy_loss(new, new.detach(), advantages, 0.2, 0.2)
    loss.sum().backward()
    assert torch.equal(loss.detach(), -advantages)
    assert not clipped.any()
    assert torch.allclose(new.grad, -advantages)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("k1", lambda x, y: x - y),
        ("k2", lambda x, y: (x - y) ** 2 / 2),
        ("k3", lambda x, y: math.exp(y - x) - 1 - (y - x)),
        ("low_var_kl", lambda x, y: min(max(math.exp(y - x) - 1 - (y - x), -10.0), 10.0)),
    ],
)
def test_kl_estimators(name, formula):
    policy, reference = draws(2, 1.5, 1.5)
    got = KL_ESTIMATORS[name](policy, reference)
    for i in range(len(policy)):
        assert float(got[i]) == pytest.approx(formula(float(policy[i]), float(reference[i])), rel=1e-12, abs=1e-12)
    if name == "low_var_kl":
        assert (got == 10.0).any(), "the bound must be met in this draw"


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_kl_estimators_have_the_kl_as_their_mean(name):
    policy, reference = draws(3, 1.0, 1.0, count=12)
    log_p, log_q = policy.log_softmax(0), reference.log_softmax(0)
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    assert float((log_p.exp() * KL_ESTIMATORS[name](log_p, log_q)).sum()) == pytest.approx(kl, rel=1e-12)


def test_sft_loss_and_entropy_bonus():
    (log_probs,) = draws(4, 1.0)
    assert sft_loss(log_probs).tolist() == [-value for value in log_probs.tolist()]
    assert entropy_bonus(log_probs, 0.3).tolist() == pytest.approx([-0.3 * value for value in log_probs.tolist()])
