"""Every policy loss against its paper's formula in a loop, and finite differences. Splits: the trainer's tests."""

import math

import pytest
import torch

from fusionrl.algorithms.estimators import LOSSES
from fusionrl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossOptions
from fusionrl.algorithms.sequences import Sequences
from tests.algorithms.flat import Flat, flat_batch, relative, sequences_of

NAMES = sorted(POLICY_LOSSES)
OPTIONS = PolicyLossOptions(eps_low=0.15, eps_high=0.25, dual_clip=1.6, sapo_tau_neg=1.3, kl_cov_coef=0.7)


def call(name: str, batch: Flat, log_probs: torch.Tensor, sequences: Sequences, options: PolicyLossOptions = OPTIONS):
    extra = {"selected": batch.selected} if LOSSES[name].selects else {}
    return POLICY_LOSSES[name](log_probs, batch.old, batch.advantages, batch.mask, sequences, options, **extra)


def gradient(name: str, batch: Flat) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, its gradient [N]) of one micro-batch on one rank."""
    x = batch.log_probs.clone().requires_grad_()
    losses, _ = call(name, batch, x, sequences_of(batch))
    loss = (batch.weights * losses).sum()
    loss.backward()
    return loss.detach(), x.grad


def ppo_of(r: float, a: float) -> float:
    loss = max(-a * r, -a * min(max(r, 0.85), 1.25))
    return min(loss, -a * 1.6) if a < 0 else loss


def reference(name: str, batch: Flat) -> list[float]:
    """Losses of the tokens, straight from the papers."""
    new, old, adv = batch.log_probs.tolist(), batch.old.tolist(), batch.advantages.tolist()
    losses = []
    for t in range(len(new)):
        if batch.mask[t] == 0:
            losses.append(0.0)
            continue
        r, a = math.exp(new[t] - old[t]), adv[t]
        own = [i for i in range(len(new)) if batch.index[i] == batch.index[t] and batch.mask[i] > 0]
        if name == "ppo":
            losses.append(ppo_of(r, a))
        elif name in ("gspo", "gspo_token"):
            product = math.prod(math.exp(new[i] - old[i]) for i in own)
            losses.append(ppo_of(product ** (1 / len(own)), a))
        elif name == "cispo":
            losses.append(-min(max(r, 0.85), 1.25) * a * new[t])
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.3
            losses.append(-a * 4 / tau / (1 + math.exp(-tau * (r - 1))))
        elif name == "gpg":
            losses.append(-a * new[t])
        elif name == "gmpo":
            terms = []
            for i in own:  # min(r A, clip(r) A) of A's sign, as a ratio again
                ratio = math.exp(new[i] - old[i])
                clipped = min(max(ratio, math.exp(-0.15)), math.exp(0.25))
                terms.append(min(ratio, clipped) if adv[i] > 0 else max(ratio, clipped))
            losses.append(-sum(adv[i] for i in own) / len(own) * math.prod(terms) ** (1 / len(own)))
        elif name == "clip_cov":
            losses.append(0.0 if batch.selected[t] else ppo_of(r, a))
        else:
            assert name == "kl_cov"
            losses.append(-a * r + (0.7 * abs(new[t] - old[t]) if batch.selected[t] else 0.0))
    return losses


@pytest.mark.parametrize("token_advantages", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_equals_its_formula(name: str, token_advantages: bool):
    batch = flat_batch(3, token_advantages=token_advantages)
    losses, metrics = call(name, batch, batch.log_probs, sequences_of(batch))
    assert losses.tolist() == pytest.approx(reference(name, batch), rel=1e-12, abs=1e-14)
    kl = [o - n if m else 0.0 for n, o, m in zip(batch.log_probs, batch.old, batch.mask, strict=True)]
    assert metrics["ppo_kl"].tolist() == pytest.approx([float(k) for k in kl], abs=1e-14)
    assert all(value.shape == losses.shape and not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cispo", "gspo_token"}))
def test_gradient_equals_finite_differences(name: str):
    batch = flat_batch(4, token_advantages=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (batch.weights * call(name, batch, x, sequences_of(batch))[0]).sum()

    assert torch.autograd.gradcheck(loss, batch.log_probs.clone().requires_grad_(), eps=1e-7, atol=1e-8)


def test_gradients_where_the_method_stops_a_part_of_it():
    """CISPO: `-clip(r) A` of each token, none is lost. GSPO's token form: `-A s` where PPO's clip lets it through."""
    batch = flat_batch(5, token_advantages=True)
    _, cispo = gradient("cispo", batch)
    ratio = (batch.log_probs - batch.old).exp()
    assert relative(cispo, -batch.weights * ratio.clamp(0.85, 1.25) * batch.advantages) < 1e-12
    _, token = gradient("gspo_token", batch)
    free = 0
    for t in range(len(token)):
        own = (batch.index == batch.index[t]) & (batch.mask > 0)
        s = math.exp(float((batch.log_probs - batch.old)[own].mean())) if own.any() else 1.0
        a = float(batch.advantages[t])
        lost = (a > 0 and s > 1.25) or (a < 0 and (s < 0.85 or s > 1.6))
        want = 0.0 if lost else -a * s * float(batch.weights[t])
        assert float(token[t]) == pytest.approx(want, rel=1e-10, abs=1e-15)
        free += want != 0
    assert free > 3


def test_the_two_forms_of_gspo_agree_where_the_paper_says_so():
    batch = flat_batch(6, spread=0.2)
    assert relative(gradient("gspo", batch)[1], gradient("gspo_token", batch)[1]) < 1e-12
    mixed = flat_batch(6, spread=0.2, token_advantages=True)
    assert relative(gradient("gspo", mixed)[1], gradient("gspo_token", mixed)[1]) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_of_the_trained_policy_is_not_hidden(name: str):
    batch = flat_batch(11)
    token = int(torch.nonzero(batch.mask)[2])
    batch.log_probs[token] = math.nan
    for old in (batch.old[token].clone(), math.nan):  # with the policy's own log-probs as the old ones, both are NaN
        batch.old[token] = old
        losses, metrics = call(name, batch, batch.log_probs, sequences_of(batch))
        assert not losses.isfinite().all() and not metrics["old_not_finite"].any()


def test_metrics_say_where_the_clip_took_the_gradient():
    batch = flat_batch(14, spread=1.0)
    x = batch.log_probs.clone().requires_grad_()
    losses, metrics = call("ppo", batch, x, sequences_of(batch))
    losses.sum().backward()
    stopped = (metrics["clip_fraction"] + metrics["dual_clip_fraction"]) > 0
    assert torch.equal(stopped[batch.mask > 0], (x.grad == 0)[batch.mask > 0])
    assert metrics["clip_fraction"].any() and metrics["dual_clip_fraction"].any()
    _, open_ended = call("ppo", batch, batch.log_probs, sequences_of(batch), PolicyLossOptions(dual_clip=None))
    assert "dual_clip_fraction" not in open_ended
    _, gate = call("sapo", batch, batch.old.clone(), sequences_of(batch))
    assert gate["gate"].tolist() == batch.mask.tolist(), "on policy the gate is wide open"


@pytest.mark.parametrize("name", NAMES)
def test_ratios_out_of_all_bounds_give_finite_losses_and_gradients(name: str):
    batch = flat_batch(12, token_advantages=True)
    batch.old[::2], batch.old[1::3] = -150.0, 150.0
    for dtype in (torch.float32, torch.float64):
        converted = batch.pick(torch.arange(len(batch.old)))
        for field in ("log_probs", "old", "advantages", "mask", "weights"):
            setattr(converted, field, getattr(batch, field).to(dtype))
        loss, grad = gradient(name, converted)
        assert loss.isfinite() and grad.isfinite().all() and grad.dtype == dtype
