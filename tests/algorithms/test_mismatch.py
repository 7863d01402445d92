"""The report on engine and trainer: its figures against loops, its sums over any split, and what its warning names."""

import math

import pytest
import torch

from fusionrl.algorithms.divergence import mismatch_metrics, mismatch_sums
from fusionrl.algorithms.mismatch_report import MismatchLimits, mismatch_warning
from fusionrl.runtime.reporter import MismatchWatch


def draws(difference: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trainer's and engine's log-probs that differ so, and a mask of ones."""
    rollout = torch.randn(len(difference), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 3
    return rollout + difference, rollout, torch.ones(len(difference), dtype=torch.float64)


def noise(scale: float, size: int = 2000) -> torch.Tensor:
    """Differences whose ratios have a mean of 1, as those of drawn tokens do."""
    draws = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return scale * draws - scale**2 / 2


def warning(difference: torch.Tensor, **options: object) -> str | None:
    return mismatch_warning(mismatch_metrics(*mismatch_sums(*draws(difference))), **options)


def test_metrics_equal_loops_over_any_split():
    train, rollout, mask = draws(noise(0.6, 50))
    mask[::7] = 0
    rollout[0], rollout[8], train[9] = math.nan, -math.inf, math.nan  # the first is masked
    rollout[10], rollout[11], rollout[14], rollout[15] = 0.0, 0.0, 0.0, 0.0  # the third is masked
    train[10], train[11], train[14], train[15] = -3.0, -0.6, -3.0, -0.4
    parts = [mismatch_sums(train[i], rollout[i], mask[i]) for i in (slice(0, 13), slice(13, 13), slice(13, 50))]
    got = mismatch_metrics(sum(sums for sums, _ in parts), torch.stack([peak for _, peak in parts]).max())
    x = [float(train[i] - rollout[i]) for i in range(50) if mask[i] and i not in (8, 9)]
    ratios = [math.exp(d) for d in x]
    n = len(x)
    assert got == {
        "logprob_not_finite": pytest.approx(2 / (n + 2)),
        "logprob_diff_mean": pytest.approx(sum(map(abs, x)) / n),
        "logprob_diff_max": pytest.approx(max(map(abs, x))),
        "logprob_diff_signed": pytest.approx(sum(x) / n),
        "logprob_ratio_mean": pytest.approx(sum(ratios) / n),
        "logprob_ratio_error": pytest.approx((sum(r * r for r in ratios) / n - (sum(ratios) / n) ** 2) ** 0.5 / n**0.5),
        "logprob_k3": pytest.approx(sum(math.exp(d) - 1 - d for d in x) / n),
        "logprob_diff_over": pytest.approx(sum(abs(d) > 0.5 for d in x) / n),
        "logprob_ess": pytest.approx(sum(ratios) ** 2 / (n * sum(r * r for r in ratios))),
        "logprob_not_sampled": pytest.approx(2 / n),
    }


def test_nothing_to_compare():
    none = mismatch_metrics(*mismatch_sums(*draws(torch.zeros(0, dtype=torch.float64))))
    assert none == {} and mismatch_warning(none) is None
    train, rollout, mask = draws(torch.zeros(3, dtype=torch.float64))
    bad = mismatch_metrics(*mismatch_sums(train, rollout * math.nan, mask))
    assert bad == {"logprob_not_finite": 1.0}
    text = mismatch_warning(bad)
    assert text is not None and "100.00% of the tokens have a log-prob of -inf or NaN" in text
    assert "--rollout-top-p" in text


def test_equal_log_probs_and_small_noise_say_nothing():
    assert warning(torch.zeros(100, dtype=torch.float64)) is None
    assert warning(noise(0.02)) is None


def drawn(sampled: torch.Tensor, *reported: torch.Tensor) -> list[torch.Tensor]:
    """The log-probs that two sides report for tokens of distribution `sampled`."""
    token = torch.multinomial(sampled.exp(), 1, generator=torch.Generator().manual_seed(3))
    return [log_probs.gather(1, token)[:, 0] for log_probs in reported]


def test_tokens_of_another_distribution_point_at_the_sampling_settings():
    logits = torch.randn(3000, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2
    at_1, cold = logits.log_softmax(1), (logits / 0.7).log_softmax(1)
    top = logits.where(logits >= logits.topk(8).values[:, -1:], -math.inf).log_softmax(1)
    # At 0.7, which the engine's log-probs leave out; from the eight best, of which the trainer knows nothing.
    for sampled, trainer, engine in ((cold, cold, at_1), (top, at_1, top)):
        train, rollout = drawn(sampled, trainer, engine)
        text = warning(train - rollout)
        assert text is not None and "Look at: --rollout-temperature, --rollout-top-p and --rollout-top-k" in text
        exact = float((sampled.exp() * (trainer - engine).exp()).where(sampled.isfinite(), 0.0).sum(1).mean())
        metrics = mismatch_metrics(*mismatch_sums(train, rollout, torch.ones(3000)))
        assert abs(metrics["logprob_ratio_mean"] - exact) < 4 * metrics["logprob_ratio_error"] < 0.05
    # With other weights, or a trainer at another temperature, the log-probs are right for what was drawn.
    train, rollout = drawn(cold, at_1, cold)
    text = warning(train - rollout)
    assert text is not None and "--rollout-top-p" not in text and "weight version" in text.split(";")[1]


def test_the_shape_of_the_difference_decides_what_is_named_first():
    few = noise(0.002)
    few[::200] = -4.0
    for difference, first in (
        (few, "MoE routing that differs"),
        (noise(0.2), "the dtype of weights, KV cache and out"),
    ):
        text = warning(difference)
        assert text is not None and f"Look at: {first}" in text
    text = warning(noise(0.6), changed_by=("min_new_tokens",))
    assert text is not None and "Look at: the requests' min_new_tokens: the engine's log-probs" in text
    assert warning(noise(0.02), changed_by=("min_new_tokens",)) is None


GENERATE = "--custom-generate-function-path my_generate.py:generate"


def with_tool_tokens(count: int, size: int = 2000) -> dict[str, float]:
    """The report on samples in which `count` tokens of a tool have mask 1 and log-prob 0."""
    train, rollout, mask = draws(noise(0.002, size))
    tool = slice(100, 100 + count)
    train[tool], rollout[tool] = train[tool].clamp(max=-0.6), 0.0
    return mismatch_metrics(*mismatch_sums(train, rollout, mask))


@pytest.mark.parametrize("count", [4, 40, 400, 1900])
def test_trained_tokens_that_no_engine_sampled_point_at_the_mask(count: int):
    metrics = with_tool_tokens(count)
    assert metrics["logprob_not_sampled"] == count / 2000
    text = mismatch_warning(metrics, functions=[GENERATE])
    assert text is not None and f"the loss_mask that {GENERATE} sets" in text and "--rollout-top" not in text
    assert f"{count / 2000:.1%} of the trained tokens have a log-prob of exactly 0" in text
    text = mismatch_warning(metrics)  # no function of the user's: the zeros are the engine's
    assert text is not None and "loss_mask" not in text and "Look at: --rollout-top-k and --rollout-top-p" in text


def test_a_drift_is_noticed_below_the_limits():
    assert warning(noise(0.02), earlier_mean=0.01) is None
    text = warning(noise(0.02), earlier_mean=0.001)
    assert text is not None and "mean |difference| 0.016 nats, up from 0.001" in text
    assert warning(noise(1e-5), earlier_mean=1e-7) is None, "rounding of fp32 is no drift"
    assert warning(noise(0.02), limits=MismatchLimits(mean=0.01)) is not None


def test_in_fp32_a_mismatch_that_is_large_for_fp32_is_told_at_the_first_step():
    metrics = mismatch_metrics(*mismatch_sums(*draws(noise(0.01))))
    values = {f"train/{name}": value for name, value in metrics.items()}
    assert MismatchWatch().look(1, values) is None
    text = MismatchWatch(is_fp32=True).look(1, values)
    assert text is not None and "mean |difference|" in text
    tiny = mismatch_metrics(*mismatch_sums(*draws(noise(1e-5))))
    assert MismatchWatch(is_fp32=True).look(1, {f"train/{name}": value for name, value in tiny.items()}) is None
