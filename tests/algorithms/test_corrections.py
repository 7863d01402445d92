"""Importance weights and rejections against loops, also for log-probs that are not numbers."""

import math

import pytest
import torch

from fusionrl.algorithms.corrections import CorrectionOptions, importance_weights, opsm_mask
from tests.algorithms.flat import Flat, flat_batch, sequences_of

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "mask", "none")
RANGE = {"low": 0.7, "high": 1.4, "reject_low": 0.6, "reject_high": 1.8}


def weigh(batch: Flat, options: CorrectionOptions):
    return importance_weights(batch.log_probs, batch.old, batch.mask, sequences_of(batch), options)


def reference(batch: Flat, o: CorrectionOptions) -> tuple[list[float], list[bool]]:
    """Weights and kept tokens, token by token."""
    size = len(batch.mask)
    log_ratio = (batch.log_probs - batch.old).tolist()
    sound = [
        batch.mask[i] > 0 and math.isfinite(batch.old[i]) and math.isfinite(batch.log_probs[i]) for i in range(size)
    ]
    weights, keep = [], []
    for t in range(size):
        own = [i for i in range(size) if batch.index[i] == batch.index[t] and sound[i]]
        total = sum(log_ratio[i] for i in own)
        ratios = {
            "token": math.exp(log_ratio[t]) if sound[t] else 1.0,
            "sequence": math.exp(total),
            "geometric": math.exp(total / max(len(own), 1)),
        }
        ratio, kept = ratios[o.level], sound[t]
        if o.reject_level == "token":
            kept = kept and all(o.reject_low <= math.exp(log_ratio[i]) <= o.reject_high for i in own)
        elif o.reject_level is not None:
            kept = kept and o.reject_low <= ratios[o.reject_level] <= o.reject_high
        if o.veto is not None:
            trained = [i for i in range(size) if batch.index[i] == batch.index[t] and batch.mask[i] > 0]
            kept = kept and not any(log_ratio[i] < math.log(o.veto) for i in trained)
        if o.mode == "mask":
            kept = kept and o.low <= ratio <= o.high
        weight = {"none": 1.0, "mask": ratio, "truncate": min(max(ratio, o.low), o.high)}[o.mode]
        weights.append(float(weight) if kept else 0.0)
        keep.append(bool(kept))
    return weights, keep


@pytest.mark.parametrize("veto", [None, 0.55])
@pytest.mark.parametrize("reject", [None, *LEVELS])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_equals_a_loop(level: str, mode: str, reject: str | None, veto: float | None):
    options = CorrectionOptions(level=level, mode=mode, reject_level=reject, veto=veto, **RANGE)
    batch = flat_batch(20)
    batch.old[[0, 8]] = torch.tensor([-math.inf, math.nan], dtype=torch.float64)
    batch.log_probs[14] = -math.inf
    want_weights, want_keep = reference(batch, options)
    weights, keep, metrics = weigh(batch, options)
    assert keep.tolist() == want_keep and weights.tolist() == pytest.approx(want_weights, rel=1e-12)
    assert all(value.isfinite().all() for value in metrics.values())
    assert torch.equal(metrics["is_dropped"] == 0, keep)


def test_the_methods_by_name():
    """Ratios of 0.25, 1, 3 and 8 under --use-tis --tis-clip 2, with --tis-clip-low, and under IcePop."""
    batch = flat_batch(0).pick(torch.arange(4))
    batch.mask = torch.ones(4, dtype=torch.float64)
    batch.log_probs = batch.old + torch.tensor([0.25, 1.0, 3.0, 8.0], dtype=torch.float64).log()
    for options, want in (
        (CorrectionOptions(), [0.25, 1, 2, 2]),
        (CorrectionOptions(low=0.5), [0.5, 1, 2, 2]),
        (CorrectionOptions(mode="mask", low=0.5, high=5.0), [0, 1, 3, 0]),
    ):
        weights, _, metrics = weigh(batch, options)
        assert weights.tolist() == pytest.approx(want)
        assert metrics["is_ratio"].tolist() == pytest.approx([0.25, 1, 3, 8])
        assert metrics["is_abs"].tolist() == pytest.approx([0.75, 0, 2, 7])
        clipped = [float(abs(w - r) > 1e-9) for w, r in zip(want, [0.25, 1, 3, 8], strict=True)]
        assert metrics["is_clip_fraction"].tolist() == clipped


@pytest.mark.parametrize("mode", ["none", "truncate", "mask"])
def test_weights_carry_no_gradient(mode):
    """They belong to the policy before the update, also where a loss gives its own log-probs for these."""
    batch = flat_batch(24)
    own = batch.log_probs.clone().requires_grad_()
    weights, _, metrics = importance_weights(
        own, batch.old, batch.mask, sequences_of(batch), CorrectionOptions(mode=mode)
    )
    assert not weights.requires_grad and not any(values.requires_grad for values in metrics.values())


def test_opsm_masks_bad_sequences_that_are_far_off():
    batch = flat_batch(33, token_advantages=True)
    batch.old[2] = math.nan
    inputs = (batch.log_probs, batch.old, batch.advantages, batch.mask, sequences_of(batch))
    keep, metrics = opsm_mask(*inputs, delta=0.02)
    assert torch.equal(metrics["opsm_fraction"] > 0, ~keep)
    got = ~keep
    for t in range(20):
        own = [i for i in range(20) if batch.index[i] == batch.index[t] and batch.mask[i] > 0 and i != 2]
        divergence = sum(float(batch.old[i] - batch.log_probs[i]) for i in own) / max(len(own), 1)
        assert bool(got[t]) == bool(batch.mask[t] > 0 and batch.advantages[t] < 0 and divergence > 0.02)
    assert 1 < got.sum() < (batch.advantages < 0).sum()
