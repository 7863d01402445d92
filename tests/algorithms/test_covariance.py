"""Which tokens Clip-Cov and KL-Cov choose, against a plain statement of it, and for any order of the tokens."""

import numpy as np
import pytest

from fusionrl.algorithms.covariance import select, token_numbers
from fusionrl.algorithms.policy_losses import PolicyLossOptions

OPTIONS = PolicyLossOptions(clip_cov_fraction=0.05, clip_cov_low=0.2, clip_cov_high=2.0, kl_cov_fraction=0.05)


def tokens(seed: int = 0, count: int = 400) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    lengths = random.multinomial(count, np.ones(12) / 12)
    return {
        "log_probs": random.normal(-2, 1, count),
        "advantages": np.repeat(random.normal(size=12), lengths),
        "mask": (random.random(count) < 0.8).astype(np.float32),
        "sample_index": np.repeat(random.permutation(1000)[:12], lengths),
        "position": np.concatenate([np.arange(n) for n in lengths]),
    }


def covariances(batch: dict[str, np.ndarray]) -> dict[int, float]:
    """By token that counts, in plain Python."""
    use = [i for i in range(len(batch["mask"])) if batch["mask"][i] > 0 and np.isfinite(batch["log_probs"][i])]
    mean_p = sum(batch["log_probs"][i] for i in use) / len(use)
    mean_a = sum(batch["advantages"][i] for i in use) / len(use)
    return {i: (batch["log_probs"][i] - mean_p) * (batch["advantages"][i] - mean_a) for i in use}


def test_kl_cov_takes_the_highest_covariances():
    batch = tokens()
    batch["log_probs"][:3] = [-np.inf, np.nan, -1.0]
    expected = covariances(batch)
    highest = sorted(expected, key=lambda i: -expected[i])[: int(0.05 * len(expected))]
    assert sorted(np.flatnonzero(select("kl_cov", **batch, seed=0, options=OPTIONS))) == sorted(highest)


def test_clip_cov_takes_its_share_at_random_from_the_range():
    batch = tokens()
    expected = covariances(batch)
    clipped = np.arange(400) % 5 == 0
    allowed = {i for i, value in expected.items() if 0.2 < value < 2.0 and not clipped[i]}
    chosen: set[int] = set()
    for seed in range(40):
        selected = set(np.flatnonzero(select("clip_cov", **batch, seed=seed, options=OPTIONS, clipped=clipped)))
        assert selected <= allowed and len(selected) == int(0.05 * len(expected)) < len(allowed)
        chosen |= selected
    assert chosen == allowed, "over the seeds every token has its turn"


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_no_order_or_split_changes_the_choice(name: str):
    """The tokens may come from any ranks in any order; equal covariances are told apart by sample and position."""
    batch = tokens(1)
    batch["log_probs"] = batch["log_probs"].round(0)  # most are equal, in a sample
    whole = select(name, **batch, seed=3, options=OPTIONS)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(400)
        shuffled = {key: value[order] for key, value in batch.items()}
        assert np.array_equal(select(name, **shuffled, seed=3, options=OPTIONS), whole[order])


def test_token_numbers_depend_on_each_part_and_are_even():
    sample, position = np.repeat(np.arange(200), 200), np.tile(np.arange(200), 200)
    numbers = token_numbers(5, sample, position)
    assert len(set(numbers.tolist())) == 40_000
    assert np.array_equal(numbers[7:9], token_numbers(5, sample[7:9], position[7:9]))
    assert not (numbers == token_numbers(6, sample, position)).any()
    assert not np.array_equal(numbers, token_numbers(5, position, sample))
    share = np.histogram(numbers / 2.0**64, 20, (0, 1))[0] / 2000
    assert np.abs(share - 1).max() < 0.15  # 3.4 standard deviations are 0.076
    assert abs(np.corrcoef(numbers[:-1].astype(float), numbers[1:].astype(float))[0, 1]) < 0.03
