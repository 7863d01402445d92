"""Whitening against statistics over the trained tokens, whole and in parts."""

import math
import statistics

import numpy as np
import pytest
import torch

from fusionrl.algorithms.token_advantages import moments, whiten


def draws(seed: int, size: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    values, mask = torch.tensor(rng.normal(3.0, 2.0, size)), torch.tensor(rng.random(size) < 0.6)
    values[~mask] = math.nan
    return values, mask


def test_equals_the_formula() -> None:
    values, mask = draws(0)
    trained = values[mask].tolist()
    mean, variance = statistics.fmean(trained), statistics.variance(trained)
    got = whiten(values, mask, moments(values, mask))
    for x, m, g in zip(values.tolist(), mask.tolist(), got.tolist(), strict=True):
        want = (x - mean) / math.sqrt(variance + 1e-8) if m else 0.0
        assert g == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_no_split_changes_it() -> None:
    values, mask = draws(1)
    whole = whiten(values, mask, moments(values, mask))
    parts = torch.randperm(500, generator=torch.Generator().manual_seed(1)).split(90)
    total = torch.stack([moments(values[p], mask[p]) for p in parts]).sum(0)
    got = torch.empty_like(whole)
    for p in parts:
        got[p] = whiten(values[p], mask[p], total)
    assert float((got - whole).norm() / whole.norm()) < 1e-12


def test_float32_far_from_zero_keeps_its_digits() -> None:
    values = (1e4 + torch.tensor(np.random.default_rng(2).normal(size=4000))).float()
    got = whiten(values, torch.ones(4000), moments(values, torch.ones(4000)))
    exact = values.double()
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), (exact - exact.mean()) / (exact.var() + 1e-8).sqrt(), atol=1e-5)


def test_without_a_deviation() -> None:
    all_of = torch.ones(1001)
    for same in (torch.full((1001,), value) for value in (0.1, 1e4 + 0.1)):  # of fp32: the mean is no float
        assert whiten(same, all_of, moments(same, all_of)).abs().max() < 1e-3
    one = torch.tensor([5.0, math.nan])
    assert whiten(one, torch.tensor([1, 0]), moments(one, torch.tensor([1, 0]))).tolist() == [0.0, 0.0]
    none = torch.zeros(1001)
    assert not whiten(same, none, moments(same, none)).any()
    assert whiten(same[:0], all_of[:0], moments(same[:0], all_of[:0])).shape == (0,)


def test_a_value_that_is_not_finite_stops_every_rank() -> None:
    bad, good, mask = torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), torch.ones(2)
    total = moments(bad, mask) + moments(good, mask)
    for values in (bad, good):
        with pytest.raises(ValueError, match="advantages to be whitened are not finite"):
            whiten(values, mask, total)
