"""Staleness: how many pushes of weights lie between the weights that sampled a token and those that train on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusionrl.data.sample import UNKNOWN_VERSION, Sample, response_mask

LAST_BIN = 8  # of the histogram: it also counts what is older


def training_version(samples: Sequence[Sample], pushed: int | None = None) -> int | None:
    """Return the version of the weights that will train on these samples.

    pushed  version of the last push; None where that is not known, as for samples read from a file: then it is the
            newest version that sampled any of their tokens, and None if no token has a version.
    """
    known = [
        int(np.max(s.weight_versions)) for s in samples if s.weight_versions is not None and len(s.weight_versions)
    ]
    newest = max(known, default=UNKNOWN_VERSION)
    newest = max(newest, UNKNOWN_VERSION if pushed is None else pushed)
    return None if newest == UNKNOWN_VERSION else newest


def is_current(sample: Sample, version: int) -> np.ndarray:
    """[response_length] bool: False where weights older than `version` sampled the token.

    A token of an unknown version counts as current.
    """
    if sample.weight_versions is None:
        return np.ones(sample.response_length, bool)
    versions = np.asarray(sample.weight_versions, np.int32)
    return (versions >= version) | (versions == UNKNOWN_VERSION)


def staleness_metrics(samples: Sequence[Sample], version: int | None) -> dict[str, float]:
    """Staleness of the trained tokens, and of the samples, each as old as its oldest trained token.

    version  of the weights that will train on them; None: nothing is known, and there are no metrics.
    """
    if version is None:
        return {}
    of_tokens: list[np.ndarray] = []
    num_unknown = 0
    for sample in samples:
        trained = response_mask(sample) > 0
        if sample.weight_versions is None:
            num_unknown += int(trained.sum())
            continue
        versions = np.asarray(sample.weight_versions, np.int64)[trained]
        known = versions[versions != UNKNOWN_VERSION]
        num_unknown += len(versions) - len(known)
        if len(known):
            of_tokens.append(np.maximum(version - known, 0))
    if not of_tokens:
        return {}
    tokens = np.concatenate(of_tokens)
    oldest = np.array([ages.max() for ages in of_tokens])
    metrics = {
        "rollout/staleness/token_mean": float(tokens.mean()),
        "rollout/staleness/token_max": float(tokens.max()),
        "rollout/staleness/sample_mean": float(oldest.mean()),
        "rollout/staleness/sample_max": float(oldest.max()),
    }
    metrics |= {f"rollout/staleness/tokens/{age}": share for age, share in _histogram(tokens).items()}
    metrics |= {f"rollout/staleness/samples/{age}": share for age, share in _histogram(oldest).items()}
    if num_unknown:
        metrics["rollout/staleness/unknown"] = num_unknown / (num_unknown + len(tokens))
    return metrics


def _histogram(ages: np.ndarray) -> dict[int, float]:
    """Age in pushes -> share, of those that occur and of 0."""
    counts = np.bincount(np.minimum(ages, LAST_BIN))
    return {age: float(count / len(ages)) for age, count in enumerate(counts) if count or not age}
