"""pass@k against all subsets, the error of a mean against resampling."""

import itertools

import numpy as np
import pytest

from fusionrl.algorithms.evaluation import clustered_error, pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for n in range(1, 9):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_of_many_samples() -> None:
    """The paper's product, which is the same number; factorials of hundreds do not overflow."""
    n, c, k = 1000, 3, 256
    assert pass_at_k(n, c, k) == pytest.approx(1 - np.prod(1 - k / np.arange(n - c + 1, n + 1)), rel=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "message"), [(4, 2, 5, "pass@5 of 4"), (4, 2, 0, "pass@0"), (4, 5, 1, "5 of 4")]
)
def test_pass_at_k_of_impossible_counts(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


def test_error_of_groups_of_one_size_is_that_of_their_means() -> None:
    values = np.random.default_rng(0).random((20, 4))
    found = clustered_error(values.ravel(), np.repeat(np.arange(20), 4))
    assert found == pytest.approx(values.mean(1).std(ddof=1) / np.sqrt(20), rel=1e-12)
    alone = clustered_error(values.ravel(), np.arange(80))
    assert alone == pytest.approx(values.std(ddof=1) / np.sqrt(80), rel=1e-12)
    assert clustered_error([0.0, 1.0], [3, 3]) is None


def test_error_of_groups_of_several_sizes_is_that_of_a_cluster_bootstrap() -> None:
    rng = np.random.default_rng(1)
    groups = [rng.normal(rng.normal(), 0.5, size) for size in rng.integers(1, 9, 200)]
    ids = np.repeat(np.arange(200), [len(g) for g in groups])
    found = clustered_error(np.concatenate(groups), ids)
    sums, counts = np.array([g.sum() for g in groups]), np.array([len(g) for g in groups])
    draws = rng.integers(0, 200, (20000, 200))
    bootstrap = (sums[draws].sum(1) / counts[draws].sum(1)).std()
    assert found == pytest.approx(bootstrap, rel=0.05)
    # Samples of a prompt are alike here: as if independent, the error would be far too small.
    assert found > 1.4 * clustered_error(np.concatenate(groups), np.arange(len(ids)))  # type: ignore[operator]
