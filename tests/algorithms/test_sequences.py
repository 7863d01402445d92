"""Sums over sequences against loops."""

import math

import torch

from fusionrl.algorithms.sequences import Sequences
from tests.algorithms.flat import flat_batch, sequences_of


def of_lengths(lengths):
    return Sequences(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), len(lengths))


def test_sum_mean_and_spread_equal_loops():
    batch = flat_batch(0).pick(torch.randperm(20, generator=torch.Generator().manual_seed(1)))  # in any order
    sequences = sequences_of(batch)
    totals, means = sequences.sum(batch.log_probs), sequences.mean(batch.log_probs, batch.mask)
    for s in range(batch.count):
        own = [i for i in range(20) if int(batch.index[i]) == s]
        trained = [float(batch.log_probs[i]) for i in own if batch.mask[i] > 0]
        assert math.isclose(float(totals[s]), sum(float(batch.log_probs[i]) for i in own), abs_tol=1e-12)
        assert math.isclose(float(means[s]), sum(trained) / len(trained) if trained else 0.0, abs_tol=1e-12)
    assert torch.equal(sequences.spread(totals), torch.stack([totals[s] for s in batch.index]))


def test_long_sequences_of_fp32_are_added_in_fp64():
    x = torch.full((100_000,), 0.1)
    x[0] = 1e4
    assert float(of_lengths([100_000]).sum(x)) == float(x.double().sum().float())


def test_a_gradient_is_the_same_bit_by_bit_each_time() -> None:
    """Also where threads meet within a sequence: a resumed run is compared with one that was not stopped."""
    generator = torch.Generator().manual_seed(0)
    sequences = of_lengths([66_667] * 3)
    weights = torch.randn(200_001, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = set()
        for _ in range(20):
            values = torch.ones(3, requires_grad=True)
            (sequences.spread(values) * weights).sum().backward()
            assert values.grad is not None
            found.add(values.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
