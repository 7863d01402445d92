"""KL estimators and value loss against loops in Python's float64."""

import math

import numpy as np
import pytest
import torch

from fusionrl.algorithms.divergence import KL_ESTIMATORS, unbiased_kl
from fusionrl.algorithms.policy_losses import value_loss


def draws(seed, *scales, count=200):
    random = np.random.default_rng(seed)
    return [torch.tensor(scale * random.normal(size=count), dtype=torch.float64) for scale in scales]


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


def two_policies(seed, size=7):
    """Log-probs over a small vocabulary: (logits of the policy, of an older one, of the reference)."""
    return [draw[:size].clone() for draw in draws(seed, 1.0, 1.0, 1.0)]


def slope(of, logits):
    """Gradient of a scalar by the logits."""
    logits = logits.clone().requires_grad_()
    of(logits).backward()
    return logits.grad


def true_kl(logits, reference):
    p, q = logits.log_softmax(0), reference.log_softmax(0)
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k3", True), ("low_var_kl", True), ("k2", False)])
def test_weighted_kl_has_the_kl_and_its_gradient_as_means_over_an_old_policy(name, unbiased):
    """By enumeration of the vocabulary, so the means are exact; with these logits low_var_kl's bound is not met."""
    policy, old, reference = two_policies(5)

    def mean(logits):
        drawn = old.log_softmax(0)
        return (drawn.exp() * unbiased_kl(logits.log_softmax(0), drawn, reference.log_softmax(0), name)).sum()

    exact = float(mean(policy)) == pytest.approx(float(true_kl(policy, reference)), rel=1e-12)
    grad, want = slope(mean, policy), slope(lambda logits: true_kl(logits, reference), policy)
    assert exact == unbiased
    assert (float((grad - want).norm() / want.norm()) < 1e-12) == unbiased


def test_weighted_kl_without_an_old_log_prob_or_within_the_bound():
    policy, old, reference = draws(7, 3.0, 3.0, 3.0)
    old[:3] = torch.tensor([-math.inf, math.nan, math.inf])
    policy.requires_grad_()
    got = unbiased_kl(policy, old, reference, "low_var_kl")
    got.sum().backward()
    assert not got[:3].any() and not policy.grad[:3].any() and policy.grad.isfinite().all()
    for i in range(3, 200):
        x, y = float(policy[i].detach()), float(reference[i])
        want = math.exp(x - float(old[i])) * (math.exp(y - x) - 1 - (y - x))
        assert float(got[i].detach()) == pytest.approx(min(want, 10.0), rel=1e-9)
    assert (got == 10).any()
    policy.data[5] = old[5] = math.nan  # of the policy itself, whose log-probs are the old ones on policy
    assert unbiased_kl(policy, old, reference, "k3").isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss_and_its_gradient(clip):
    values, moved, returns = draws(8, 1.0, 0.3, 1.0)
    old = values + moved
    values.requires_grad_()
    loss, metrics = value_loss(values, old, returns, clip)
    loss.sum().backward()
    fired = 0
    for i in range(200):
        v, o, r = float(values.detach()[i]), float(old[i]), float(returns[i])
        free = (v - r) ** 2
        bounded = (min(max(v, o - 0.2), o + 0.2) - r) ** 2 if clip else free
        assert float(loss.detach()[i]) == pytest.approx(max(free, bounded) / 2, rel=1e-12)
        assert float(metrics["value_clip_fraction"][i]) == float(bounded > free)
        assert float(values.grad[i]) == pytest.approx(0.0 if bounded > free else v - r, rel=1e-9)
        fired += bounded > free
    assert (20 < fired < 180) if clip else fired == 0
