"""Tokens are drawn as often as their probabilities say, whatever the size of the vocabulary."""

import pytest
import torch

from fusionrl.base import cpu_wing
from fusionrl.cpu import sglang_layers
from fusionrl.cpu.sglang_layers import draw


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


def test_sglang_s_sampler_draws_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches without seeds."""
    cpu_wing.install_stand_ins()
    from sglang.srt.layers import sampler

    asked = []
    monkeypatch.setattr(sampler, "multinomial_with_seed", lambda *args: asked.append(args) or torch.zeros(40, 1))
    sglang_layers.register_sampling()
    probs = torch.rand(40, 1000)
    torch.manual_seed(3)
    tokens = sampler.sampling_from_probs_torch(probs)
    assert tokens.dtype is torch.int32
    torch.manual_seed(3)
    assert tokens.tolist() == draw(probs).tolist()
    assert not asked
    sampler.sampling_from_probs_torch(probs, sampling_seed=torch.arange(40), positions=torch.arange(40))
    assert len(asked) == 1
