"""What every algorithm makes of the inputs at the edge, in one table of functions and cases.

Cases: a group of one, equal rewards, a fully masked sample, an empty response, log-probs of -inf and NaN from the
engine, a truncated sample. A sample or token without a result must change nothing for the others: what is expected of
these is computed of a batch in which it never was.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionrl.algorithms.corrections import CorrectionOptions, importance_weights, opsm_mask
from fusionrl.algorithms.divergence import KL_ESTIMATORS, mismatch_metrics, mismatch_sums, reverse_kl_gap
from fusionrl.algorithms.dpo import pair_slopes
from fusionrl.algorithms.estimators import LOSSES
from fusionrl.algorithms.policy_losses import POLICY_LOSSES, PolicyLossOptions
from fusionrl.algorithms.sequences import Responses
from fusionrl.algorithms.stages import SampleBatch, leave_one_out
from fusionrl.algorithms.token_advantages import (
    discounted_returns,
    gae,
    implicit_reward_loss,
    implicit_rewards,
    kl_rewards,
    moments,
    prime_advantages,
    score_rewards,
    truncated_values,
    whiten,
)
from tests.algorithms.flat import Flat, flat_batch, sequences_of
from tests.algorithms.group_stages import GROUP_STAGES
from tests.algorithms.test_corrections import LEVELS, MODES

# ---------------------------------------------------------------------------------------- whole samples
ZERO, ONE = [0.0], [1.0]
GROUP_CASES = {  # rewards, baselines, trained tokens of one group -> advantages; None: those of the others alone
    "a group of one": (ONE, [0.25], [4], {"remax": [0.75]}, ZERO),
    "a group of one without a trained token": (ONE, [0.25], [0], {"remax": [0.75]}, ZERO),
    "equal rewards": ([1.0] * 3, [1.0] * 3, [4, 1, 2], {}, ZERO * 3),
    "equal rewards that no float is the mean of": ([0.1] * 3, [0.1] * 3, [4, 1, 2], {"pass_at_k": None}, ZERO * 3),
    "no trained token in a group": ([1.0, 0.0], [0.5] * 2, [0, 0], {"grpo": None, "rloo": [1.0, -1.0]}, [0.5, -0.5]),
}


@pytest.mark.parametrize("case", GROUP_CASES)
@pytest.mark.parametrize("name", GROUP_STAGES)
def test_advantages_of_samples(name: str, case: str) -> None:
    rewards, baselines, lengths, special, usual = GROUP_CASES[case]
    want = special.get(name, usual)
    batch = SampleBatch(np.array(rewards), np.zeros(len(rewards), int), np.array(lengths), np.array(baselines))
    if name == "pass_at_k" and want is None:
        with pytest.raises(ValueError, match="pass@k takes 1 for a right answer"):
            GROUP_STAGES[name](batch)
        return
    got = GROUP_STAGES[name](batch)
    if case == "no trained token in a group" and name in ("grpo", "pass_at_k"):
        deviation = np.std(rewards, ddof=int(name == "grpo")) + (1e-6 if name == "grpo" else 0.0)
        want = [0.5 / deviation, -0.5 / deviation]
    assert got.tolist() == pytest.approx(want, rel=1e-12, abs=0.0)


# ---------------------------------------------------------------------------------------- tokens
Tokens = dict[str, Tensor]  # results of tokens [N], and "…/sum": of a whole batch


def responses_of(batch: Flat) -> Responses:
    return Responses(batch.mask, batch.index.bincount(minlength=batch.count))


def policy_loss(name: str) -> Callable[[Flat], Tokens]:
    def of(batch: Flat) -> Tokens:
        extra = {"selected": batch.selected} if LOSSES[name].selects else {}
        x = batch.log_probs.clone().requires_grad_()
        given = (batch.old, batch.advantages, batch.mask, sequences_of(batch), PolicyLossOptions(dual_clip=3.0))
        losses, metrics = POLICY_LOSSES[name](x, *given, **extra)
        (gradient,) = torch.autograd.grad((batch.weights * losses).sum(), x)
        return {"loss": losses.detach(), "gradient": gradient} | metrics

    return of


def correction(level: str, mode: str, reject: str | None) -> Callable[[Flat], Tokens]:
    options = CorrectionOptions(level, mode, 0.7, 1.4, reject, 0.6, 1.8, veto=0.3 if reject else None)

    def of(batch: Flat) -> Tokens:
        given = (batch.log_probs, batch.old, batch.mask, sequences_of(batch), options)
        weights, keep, metrics = importance_weights(*given)
        return {"weight": weights, "keep": keep.double()} | metrics

    return of


def opsm(batch: Flat) -> Tokens:
    given = (batch.log_probs, batch.old, batch.advantages, batch.mask, sequences_of(batch))
    keep, metrics = opsm_mask(*given, delta=0.02)
    return {"keep": keep.double()} | metrics


def mismatch(batch: Flat) -> Tokens:
    sums, peak = mismatch_sums(batch.log_probs, batch.old, batch.mask)
    report = mismatch_metrics(sums, peak)
    report.pop("logprob_not_finite", None)
    return {f"{name}/sum": torch.tensor(value) for name, value in report.items()}


def price(kind: str) -> Callable[[Flat], Tokens]:
    return lambda batch: {"reward": kl_rewards(batch.log_probs, batch.old, batch.mask, kind, 0.3)[0]}


def distilled(batch: Flat) -> Tokens:
    return {"advantage": reverse_kl_gap(batch.log_probs, batch.old, batch.mask)[0]}


def outcome(batch: Flat) -> Tokens:
    rewards, _ = implicit_rewards(batch.log_probs, batch.old, batch.mask, 0.05)
    sequences = sequences_of(batch)
    losses = implicit_reward_loss(sequences.sum(rewards), torch.ones(batch.count).double())
    return {"reward": rewards, "loss": sequences.spread(losses)}


def prime(batch: Flat) -> Tokens:
    rewards, _ = implicit_rewards(batch.log_probs, batch.old, batch.mask, 0.05)
    responses = responses_of(batch)
    baselines = leave_one_out(responses.mean(rewards, "process reward").numpy(), np.zeros(batch.count, int))
    scores = torch.zeros(batch.count).double()
    return {"advantage": prime_advantages(rewards, torch.from_numpy(baselines), scores, responses, 0.9)}


def scores_of(batch: Flat, responses: Responses) -> Tensor:
    return score_rewards(batch.index.bincount(minlength=batch.count).double(), responses)


def ppo(batch: Flat) -> Tokens:
    responses = responses_of(batch)
    last = truncated_values(batch.advantages, responses, torch.ones(batch.count).bool())
    given = (scores_of(batch, responses), batch.advantages, responses, 0.9, 0.8)
    return dict(zip(("cut", "cut/target"), gae(*given, last), strict=True)) | {"ended": gae(*given)[0]}


def plus_plus(batch: Flat) -> Tokens:
    responses = responses_of(batch)
    rewards = kl_rewards(batch.log_probs, batch.old, batch.mask, "k2", 0.2)[0] + scores_of(batch, responses)
    returns = discounted_returns(rewards, responses, 0.9)
    return {"return": returns, "whitened": whiten(returns, batch.mask, moments(returns, batch.mask))}


CORRECTIONS = itertools.product(LEVELS, MODES, (None, *LEVELS))
OF_TOKENS: dict[str, Callable[[Flat], Tokens]] = {
    **{name: policy_loss(name) for name in POLICY_LOSSES},
    **{f"{level}-{mode}-{reject}": correction(level, mode, reject) for level, mode, reject in CORRECTIONS},
    **{f"price-{kind}": price(kind) for kind in KL_ESTIMATORS},
    **{of.__name__: of for of in (opsm, mismatch, distilled, outcome, prime, ppo, plus_plus)},
}
# A token without a log-prob stays a step of its sample here, at a KL of 0; the others leave it out.
STAYS = {"prime", "plus_plus"}


def values_at(found: Tokens, tokens: Tensor) -> dict[str, list[float]]:
    return {name: (value if name.endswith("/sum") else value[tokens]).tolist() for name, value in found.items()}


def same(found: Tokens, tokens: Tensor, want: Tokens, wanted: Tensor) -> None:
    """Results of `tokens` are finite and those of `wanted` in another batch."""
    got, others = values_at(found, tokens), values_at(want, wanted)
    assert got.keys() == others.keys()
    for name, values in got.items():
        assert values == pytest.approx(others[name], rel=1e-12, abs=1e-14), name
        assert np.isfinite(values).all(), name


@pytest.mark.parametrize("name", OF_TOKENS)
def test_a_fully_masked_sample_is_as_good_as_none(name: str) -> None:
    """Whatever its tokens hold, and at the masked ones of other samples."""
    batch = flat_batch(40, token_advantages=True)
    sample = batch.index == 3
    batch.mask[sample], batch.weights[sample] = 0.0, 0.0
    without, masked = batch.pick(~sample), batch.mask == 0
    for field, garbage in (("log_probs", math.nan), ("old", -math.inf), ("advantages", math.nan)):
        setattr(batch, field, torch.where(masked, garbage, getattr(batch, field)))
    found = OF_TOKENS[name](batch)
    same(found, ~masked, OF_TOKENS[name](without), without.mask > 0)
    for key in ("loss", "gradient", "weight", "reward", "cut", "ended", "return", "whitened"):
        if key in found and name != "outcome":
            assert not found[key][masked].any(), f"{key}: nothing comes of what is not trained on"


@pytest.mark.parametrize("name", OF_TOKENS)
def test_an_empty_response_is_as_good_as_none(name: str) -> None:
    batch = flat_batch(41, token_advantages=True)  # sequence 2 has no token
    everywhere = torch.ones(len(batch.mask)).bool()
    without = replace(batch, index=batch.index - (batch.index > 2).long(), count=batch.count - 1)
    same(OF_TOKENS[name](batch), everywhere, OF_TOKENS[name](without), everywhere)
    nothing = OF_TOKENS[name](batch.pick(torch.zeros(0, dtype=torch.int64)))
    assert all(value.numel() == 0 for value in nothing.values())


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("name", sorted(set(OF_TOKENS) - {"ppo"}))
def test_a_log_prob_of_the_engine_that_is_no_number(name: str, bad: float) -> None:
    """The old log-probs are the engine's here, or those of a teacher or reference."""
    batch = flat_batch(42, token_advantages=True)
    trained = torch.nonzero(batch.mask)[:, 0]
    broken = torch.zeros(len(batch.mask)).bool()
    broken[trained[[1, 4, 9]]] = True
    without = batch.pick(torch.arange(len(broken)))
    batch.old[broken] = bad
    if name in STAYS:
        without.old[broken] = without.log_probs[broken]
    elif name != "distilled":
        without.mask[broken], without.weights[broken] = 0.0, 0.0
    found = OF_TOKENS[name](batch)
    assert all(value.isfinite().all() for value in found.values())
    same(found, ~broken, OF_TOKENS[name](without), ~broken)


def test_a_log_prob_that_is_no_number_is_counted() -> None:
    batch = flat_batch(43)
    broken = torch.nonzero(batch.mask)[:, 0][[0, 5]]
    batch.old[broken] = torch.tensor([math.nan, -math.inf]).double()
    given = (batch.log_probs, batch.old, batch.mask)
    assert int(kl_rewards(*given, "k1", 1.0)[1]) == int(implicit_rewards(*given, 1.0)[1]) == 2
    assert int(reverse_kl_gap(*given)[1]) == 2
    assert mismatch_metrics(*mismatch_sums(*given))["logprob_not_finite"] == pytest.approx(2 / float(batch.mask.sum()))
    assert float(correction("token", "truncate", None)(batch)["is_not_finite"].sum()) == 2
    for name in POLICY_LOSSES:
        assert float(policy_loss(name)(batch)["old_not_finite"].sum()) == 2, name
    assert pair_slopes([(0, 1.0, math.nan), (0, -1.0, 0.0), (1, 1.0, -math.inf)], 0.1, 0.0)[1]["pairs_excluded"] == 2


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"kl_cov"}))
def test_without_a_difference_between_answers_nothing_is_learnt(name: str) -> None:
    """A group of one or of equal rewards has advantages of 0, on and off policy and with old log-probs of -inf."""
    batch = flat_batch(44)
    batch.advantages = torch.zeros_like(batch.advantages)
    batch.old[::3] = -math.inf
    assert not policy_loss(name)(batch)["gradient"].any()
    batch.old = batch.log_probs.clone()
    assert not policy_loss(name)(batch)["gradient"].any()
