"""Numbers of short arrays are those that numpy gives, whatever their length and type."""

from __future__ import annotations

import numpy as np
import pytest

from fusionrl.data.sample import Sample, response_mask, trained_amount
from fusionrl.data.short_arrays import LARGEST, SHORT, are_equal, are_within, extremes, num_positive, total


@pytest.mark.parametrize("length", [1, 4, SHORT, SHORT + 1])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_])
def test_they_are_numpy_s(length: int, dtype: type) -> None:
    values = np.random.default_rng(length).integers(0, 2, length).astype(dtype)
    for one in (values, np.zeros(length, dtype), np.ones(length, dtype)):
        assert total(one) == one.sum() and extremes(one) == (one.min(), one.max())
        assert num_positive(one) == (one > 0).sum() and are_equal(one) == (len(set(one.tolist())) == 1)


@pytest.mark.parametrize("length", [1, SHORT, SHORT + 1])
def test_values_within_bounds(length: int) -> None:
    for dtype in (np.int32, np.int64, np.float32):
        values = np.full(length, 5, dtype)
        for wrong in (-2, -1, 0, 5, 7, LARGEST - 64):
            values[-1] = wrong
            for least, most in ((0, 5), (-1, LARGEST), (-1, 5), (0, LARGEST), (0, 1), (-5, -1)):
                expected = bool((values >= least).all() and (values <= most).all())
                assert are_within(values, least, most) == expected, (dtype, wrong, least, most)
    assert are_within(np.zeros(0, np.int32), 0, 1)
    assert not are_within(np.array([0.0] * length + [np.nan], np.float32), -1, 1)


def test_nan_is_an_extreme_and_more_dimensions_are_seen_through() -> None:
    assert np.isnan(extremes(np.array([0.5, np.nan, 1.0], np.float32))).all()
    assert extremes(np.array([[[3, -1]], [[2, 9]]], np.int16)) == (-1, 9)


def test_the_amount_that_is_trained_on_is_the_sum_of_the_mask() -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3)
    for mask in (None, [1, 0, 1], np.array([0, 0, 0], np.int32), [0.5, 0.25, 0.1], [True, False, True]):
        sample.loss_mask = mask
        assert trained_amount(sample) == response_mask(sample).sum()
    sample.remove_sample = True
    assert trained_amount(sample) == 0
