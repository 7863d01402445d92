"""The report of an optimizer step, and the metrics of a rollout that several steps trained on.

A step reports sums and counts, not means. Means over a rollout's steps are then pooled: each is the sum over all steps
divided by the count over all steps, so a step with few tokens weighs little.
docs/reference/metrics.md describes every name.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fusionrl.algorithms.divergence import MISMATCH_SUMS, mismatch_metrics

MISMATCH = "mismatch/"  # prefix of the token sums that `mismatch_metrics` reports
MISMATCH_PEAK = MISMATCH + "peak"  # largest |engine - trainer| of a log-prob, nats

# They compare the policy with the one before the first step, so the first step has a fixed value: ratio 1, no clip.
OFF_POLICY = frozenset(
    {"ppo_kl", "clip_fraction", "clip_fraction_tokens", "dual_clip_fraction", "gate", "value_clip_fraction"}
)
COUNTED = frozenset(
    {"num_tokens", "num_samples", "masked_samples", "skipped", "excluded", "num_pairs", "pairs_excluded"}
)
OF_PAIRS = frozenset({"dpo_loss", "reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward"})
WITH_MAXIMUM = ("ppo_kl", "clip_fraction", "value_clip_fraction", "grad_norm")
WITH_MINIMUM = ("grad_norm",)


METRICS = """
train/ppo_kl_max | nats | The largest train/ppo_kl of a single optimizer step. | mode rl
train/clip_fraction_max | share | The largest train/clip_fraction of a single optimizer step. | policy losses that
    clip
train/grad_norm_min | norm | The smallest grad_norm of a single optimizer step.
train/grad_norm_max | norm | The largest of a single optimizer step.
critic/value_clip_fraction_max | share | The largest of a single optimizer step.
critic/grad_norm_min | norm | The smallest grad_norm of a single optimizer step.
critic/grad_norm_max | norm | The largest of a single optimizer step.
prm/grad_norm_min | norm | The smallest grad_norm of a single optimizer step.
prm/grad_norm_max | norm | The largest of a single optimizer step.
"""


@dataclass(frozen=True)
class StepReport:
    """Sums of one optimizer step over all its micro-batches and ranks.

    sums           values whose sum is the metric: the loss, which has its weights already
    token_sums     sums over trained tokens, and `tokens`, their number
    sequence_sums  sums over samples of the mean over each one's trained tokens, and `sequences`, their number
    maxima         the largest of values of tokens, at least 0
    numbers        values other than sums over tokens: grad_norm, lr, skipped, num_samples, …
    """

    sums: dict[str, float]
    token_sums: dict[str, float]
    sequence_sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def pooled_metrics(
    steps: Sequence[StepReport], first_is_old: bool = False, firsts: Sequence[int] = (0,)
) -> dict[str, float]:
    """Metrics of a rollout's optimizer steps, without prefix.

    steps         at least one
    first_is_old  the policy at the first step is the one that the ratios compare with. Metrics of `OFF_POLICY` are then
                  of the steps after it, if there are any.
    firsts        places of the first step, of each adapter that learns

    Returns means over tokens and over samples, pooled over the steps; means over the steps of what is one number a step
    (`loss`, `lr`, `grad_norm`); sums of `COUNTED`; the largest of `maxima`; and the smallest and largest step as
    `…_min` and `…_max`.
    """
    later = [step for place, step in enumerate(steps) if not (first_is_old and place in firsts)] or steps
    metrics = _over_steps([step.sums for step in steps])
    for kind, counter in (("token_sums", "tokens"), ("sequence_sums", "sequences")):
        for name in _names([getattr(step, kind) for step in steps]):
            if name != counter and not name.startswith(MISMATCH):
                used = [getattr(step, kind) for step in (later if name in OFF_POLICY else steps)]
                metrics[name] = _mean(used, name, counter)
    compared = [step for step in steps if MISMATCH + MISMATCH_SUMS[0] in step.token_sums]
    if compared:
        sums = [sum(step.token_sums[MISMATCH + name] for step in compared) for name in MISMATCH_SUMS]
        peaks = [max(step.maxima[MISMATCH_PEAK] for step in compared)]
        metrics |= mismatch_metrics(torch.tensor(sums, dtype=torch.float64), torch.tensor(peaks, dtype=torch.float64))
    for name in _names([step.maxima for step in steps]):
        if not name.startswith(MISMATCH):
            metrics[name] = _extreme([step.maxima[name] for step in steps if name in step.maxima], max)
    metrics |= _over_steps([step.numbers for step in steps])
    for suffix, names, choose in (("max", WITH_MAXIMUM, max), ("min", WITH_MINIMUM, min)):
        for name in names:
            if values := _each(later if name in OFF_POLICY else steps, name):
                metrics[f"{name}_{suffix}"] = _extreme(values, choose)
    return metrics


def _names(parts: Sequence[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _mean(parts: Sequence[dict[str, float]], name: str, counter: str) -> float:
    """The sum of `name` over the parts that have it, divided by that of `counter`."""
    having = [part for part in parts if name in part]
    return sum([part[name] for part in having]) / max(sum([part[counter] for part in having]), 1.0)


def _over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums of what is `COUNTED`; means of the rest, over pairs or over the steps that have it."""
    metrics: dict[str, float] = {}
    for name in _names(steps):
        parts = [step for step in steps if name in step]
        values = [part[name] for part in parts]
        if name in COUNTED:
            metrics[name] = sum(values)
        elif name in OF_PAIRS:
            weights = [part.get("num_pairs", 1.0) for part in parts]  # a custom loss may have metrics of these names
            metrics[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / max(sum(weights), 1.0)
        else:
            metrics[name] = sum(values) / len(values)
    return metrics


def _each(steps: Sequence[StepReport], name: str) -> list[float]:
    """The metric `name` of each step that has it."""
    values = []
    for step in steps:
        if name in step.numbers:
            values.append(step.numbers[name])
        elif name in step.sequence_sums:
            values.append(_mean([step.sequence_sums], name, "sequences"))
        elif name in step.token_sums:
            values.append(_mean([step.token_sums], name, "tokens"))
    return values


def _extreme(values: Sequence[float], choose: Callable[[Sequence[float]], float]) -> float:
    # NaN compares false with everything: max() would return or lose it depending on the order.
    return math.nan if any(map(math.isnan, values)) else choose(values)
