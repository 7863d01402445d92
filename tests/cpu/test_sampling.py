"""Tokens are drawn as often as their probabilities say, whatever the size of the vocabulary."""

from types import SimpleNamespace

import pytest
import torch

from fusionrl.base import cpu_wing
from fusionrl.cpu import sglang_layers
from fusionrl.cpu.sglang_layers import draw, draw_filtered, seeded_numbers


@pytest.mark.parametrize("size", [1, 64, 49152])
def test_frequencies_are_the_probabilities(size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(size).mul_(2)
    logits[torch.rand(size) < 0.3] = -torch.inf
    logits[size // 2] = 6.0
    probs = logits.softmax(-1)
    num_draws = 12_000 if size <= 3000 else 4_000
    drawn = torch.cat([draw(probs.expand(400, size)) for _ in range(num_draws // 400)])
    counts = torch.bincount(drawn, minlength=size).double()
    assert len(counts) == size
    assert counts[probs == 0].sum() == 0
    likely = probs > 20 / num_draws
    expected = torch.cat((probs[likely].double(), probs[~likely].double().sum()[None])) * num_draws
    seen = torch.cat((counts[likely], counts[~likely].sum()[None]))
    kept = expected > 0
    chi2 = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert chi2 <= degrees + 5 * (2 * degrees) ** 0.5 + 1e-9


def test_rows_are_drawn_by_themselves_and_need_not_sum_to_one() -> None:
    size = 1500
    probs = torch.zeros(4, size)
    probs[0, 0] = probs[1, size - 1] = probs[3, 511] = 1e-30
    probs[2, 512] = 7.0
    assert draw(probs).tolist() == [0, size - 1, 512, 511]
    torch.manual_seed(1)
    first = draw(torch.ones(50, size))
    torch.manual_seed(1)
    assert torch.equal(draw(torch.ones(50, size)), first)  # all randomness is torch's
    assert len(set(first.tolist())) > 30


def test_the_ends_of_the_range_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest random number that there is, and the smallest."""
    size = 100
    probs = torch.rand(64, size).softmax(-1)
    probs[:, :3] = probs[:, -3:] = 0
    for number, token in ((0.0, 3), (1 - 2**-53, size - 4)):
        monkeypatch.setattr(torch, "rand", lambda *size, dtype, number=number: torch.full(size, number, dtype=dtype))
        assert draw(probs).tolist() == [token] * 64


def test_no_distribution_is_an_error() -> None:
    size = 600
    for value in (torch.nan, torch.inf):
        probs = torch.ones(3, size)
        probs[1, 550] = value
        with pytest.raises(RuntimeError, match="probability tensor"):
            draw(probs)
    with pytest.raises(RuntimeError):
        draw(torch.zeros(1, size))


def test_a_token_follows_from_seed_and_position_alone() -> None:
    """Whatever rows are drawn together; as often as the probabilities say, over seeds and over positions."""
    torch.manual_seed(2)
    probs = torch.rand(6, 500).softmax(-1)
    seeds, positions = torch.tensor([5, 5, 6, 2**31 - 1, -7, 2**62]), torch.tensor([10, 11, 10, 0, 3, 70_000])
    together = draw(probs, seeded_numbers(seeds, positions))
    for row in range(6):
        alone = draw(probs[row : row + 1], seeded_numbers(seeds[row : row + 1], positions[row : row + 1]))
        assert alone == together[row]
    size, count = 40, 40_000
    probs = torch.rand(size).softmax(-1)
    counting, fixed = torch.arange(count), torch.full((count,), 12345)
    for numbers in (seeded_numbers(counting, fixed), seeded_numbers(fixed, counting)):
        drawn = torch.bincount(draw(probs.expand(count, size), numbers), minlength=size)
        chi2 = ((drawn - probs * count) ** 2 / (probs * count)).sum()
        assert chi2 < size - 1 + 5 * (2 * size - 2) ** 0.5
        pairs = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]
        assert abs(pairs) < 5 / count**0.5, "of neighbours"


def test_filters_leave_the_tokens_that_sglang_leaves() -> None:
    """Top-k, top-p and min-p, as SGLang's function without seeds: which tokens are drawn, and how often."""
    cpu_wing.install_stand_ins()
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as by_sglang

    torch.manual_seed(4)
    count = 20_000
    for top_k, top_p, min_p in ((5, 1.0, 0.0), (1000, 0.6, 0.0), (8, 0.7, 0.0), (1000, 1.0, 0.3)):
        probs = (torch.randn(30) * 2).softmax(-1).expand(count, 30).contiguous()
        options = torch.full((count,), top_k), torch.full((count,), top_p), torch.full((count,), min_p)
        numbers = seeded_numbers(torch.arange(count), torch.zeros(count, dtype=torch.int64))
        ours = draw_filtered(probs, options[0], options[1], options[2] if min_p else None, numbers, min(top_k, 30))
        theirs = by_sglang(probs.clone(), *options, min_p > 0, None, torch.zeros(count))
        first, second = (torch.bincount(tokens.long(), minlength=30).double() for tokens in (ours, theirs))
        assert ((first > 0) == (second > 0)).all() and (first > 0).sum() < 30
        assert (first - second).abs().max() < 6 * (count / 2) ** 0.5


def test_sglang_s_sampler_draws_so() -> None:
    """With seeds, and in batches without them."""
    cpu_wing.install_stand_ins()
    from sglang.srt.layers import sampler

    sglang_layers.register_sampling()
    probs = torch.rand(40, 1000)
    torch.manual_seed(3)
    tokens = sampler.sampling_from_probs_torch(probs)
    assert tokens.dtype is torch.int32
    torch.manual_seed(3)
    assert tokens.tolist() == draw(probs).tolist()
    seeds, positions = torch.arange(40), torch.arange(40) + 7
    expected = draw(probs, seeded_numbers(seeds, positions)).tolist()
    assert sampler.sampling_from_probs_torch(probs, sampling_seed=seeds, positions=positions).tolist() == expected
    limits = torch.full((40,), 1000), torch.full((40,), 1e6), torch.zeros(40)  # all tokens
    filtered = sampler.top_k_top_p_min_p_sampling_from_probs_torch(probs, *limits, False, seeds, positions)
    kept, order = probs.sort(descending=True, stable=True)
    assert filtered.tolist() == order.gather(1, draw(kept, seeded_numbers(seeds, positions))[:, None])[:, 0].tolist()


def test_requests_without_a_seed_get_one_each() -> None:
    """SGLang would give 42 to all of them, and the same answer to all siblings."""
    requests = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in (None, None, 9)]
    seeds = [sglang_layers._seed_of(request) for request in requests]
    assert seeds[0] != seeds[1] and seeds[2] == 9
    assert [sglang_layers._seed_of(request) for request in requests] == seeds, "also where it is computed again"
