"""Numbers over the trained tokens of a rollout: staleness, and the distance to a teacher.

Staleness is how many trained rollouts lie between the weights that sampled a token and those that train on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fusionrl.data.sample import Sample, response_mask
from fusionrl.data.token_versions import UNKNOWN_VERSION

LAST_BIN = 8  # of the histogram: it also counts what is older


def training_version(samples: Sequence[Sample], pushed: int | None = None) -> int | None:
    """Return the version of the weights that will train on these samples: of the last push, or if that is not known, as
    for samples read from a file, the newest that sampled any of their tokens; None if no token has a version.
    """
    versions = [sample.array("weight_versions") for sample in samples]
    newest = max((int(v.max()) for v in versions if v is not None and len(v)), default=UNKNOWN_VERSION)
    newest = max(newest, UNKNOWN_VERSION if pushed is None else pushed)
    return None if newest == UNKNOWN_VERSION else newest


def is_current(sample: Sample, version: int) -> np.ndarray:
    """[response_length] bool: False where weights that are known to be older than `version` sampled the token."""
    versions = sample.array("weight_versions")
    if versions is None:
        return np.ones(sample.response_length, bool)
    return (versions >= version) | (versions == UNKNOWN_VERSION)


def token_numbers(samples: Sequence[Sample], version: int | None) -> tuple[dict[str, float], dict[str, float]]:
    """Return metrics over the trained tokens of a rollout: of their staleness, and of the distance to a teacher.

    version  `training_version` of the samples
    """
    ages: list[Counter[int]] = []  # of each sample's trained tokens whose version is known
    gaps: list[np.ndarray] = []
    num_unknown = 0
    for sample in samples:
        is_trained, log_probs = response_mask(sample) > 0, sample.array("rollout_log_probs")
        if sample.teacher_log_probs is not None and log_probs is not None:
            teacher = np.asarray(sample.teacher_log_probs, np.float64)
            gaps.append((np.asarray(log_probs, np.float64) - teacher)[is_trained])
        versions = sample.array("weight_versions")
        trained = np.full(len(is_trained), UNKNOWN_VERSION)[is_trained] if versions is None else versions[is_trained]
        known = trained[trained != UNKNOWN_VERSION]
        num_unknown += len(trained) - len(known)
        if version is not None:
            ages.append(Counter(np.maximum(version - known, 0).tolist()))
    # The mean of log p(student) - log p(teacher) estimates their reverse KL (k1).
    all_gaps = np.concatenate([np.zeros(0), *gaps])
    distance = {"rollout/opd_reverse_kl": float(all_gaps.mean())} if all_gaps.size else {}
    return _staleness_metrics(ages, num_unknown), distance


def _mean(counts: Counter[int]) -> float:
    return sum(age * count for age, count in counts.items()) / counts.total()


def _staleness_metrics(ages: Sequence[Counter[int]], num_unknown: int) -> dict[str, float]:
    """Mean, maximum and histogram by token, and by sample, each as old as its oldest trained token.

    ages         of each sample: rollouts trained between sampling weights and training weights -> number of tokens
    num_unknown  trained tokens of an unknown version
    """
    ages = [sample_ages for sample_ages in ages if sample_ages]
    if not ages:
        return {}
    tokens = sum(ages, Counter[int]())
    samples = Counter(max(sample_ages) for sample_ages in ages)
    metrics = {
        "rollout/staleness/token_mean": _mean(tokens),
        "rollout/staleness/token_max": float(max(tokens)),
        "rollout/staleness/sample_mean": _mean(samples),
        "rollout/staleness/sample_max": float(max(samples)),
    }
    metrics |= {f"rollout/staleness/tokens/{age}": share for age, share in _histogram(tokens).items()}
    metrics |= {f"rollout/staleness/samples/{age}": share for age, share in _histogram(samples).items()}
    if num_unknown:
        metrics["rollout/staleness/unknown"] = num_unknown / (num_unknown + tokens.total())
    return metrics


def _histogram(ages: Counter[int]) -> dict[int, float]:
    """Age in rollouts -> share, of those that occur and of 0."""
    shares: Counter[int] = Counter({0: 0})
    for age, count in ages.items():
        shares[min(age, LAST_BIN)] += count
    return {age: shares[age] / ages.total() for age in sorted(shares)}
