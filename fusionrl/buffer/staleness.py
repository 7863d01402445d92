"""Staleness of samples: the versions of the weights that sampled their tokens, the bound on them, and metrics.

Staleness of a token is how many trained rollouts lie between the weights that sampled it and those that train on it.
A token's version counts the rollouts that its weights were trained on; the controller's counts pushes, of which there
may be one for several rollouts. `StepStaleness` counts optimizer steps, of which a rollout may have several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.sample import Sample, response_mask
from fusionrl.data.sample_images import prompt_of
from fusionrl.data.sampling import UNKNOWN_VERSION
from fusionrl.data.train_batch import TrainShard
from fusionrl.pipeline.knobs import Knobs


def oldest_version(samples: Sequence[Sample], fetches_per_push: int) -> int | None:
    """Return the controller's version of the oldest token that is trained; None where none is known."""
    oldest = [versions.min() for sample in samples if len(versions := trained_versions(sample))]
    return int(min(oldest)) // fetches_per_push if oldest else None


def trained_versions(sample: Sample) -> np.ndarray:
    """[n] versions of the tokens of a sample that are trained on, those that are known."""
    if sample.weight_versions is None:
        return np.zeros(0, np.int64)
    versions = np.asarray(sample.weight_versions, np.int64)[response_mask(sample) > 0]
    return versions[versions != UNKNOWN_VERSION]


def without_answer(sample: Sample) -> Sample:
    """Return the sample as its prompt came, where it has an answer: one that another run left, of older weights."""
    if not sample.response_length:
        return sample
    blank = prompt_of(sample)
    blank.index, blank.session_id = sample.index, sample.session_id
    return blank


def check_not_older(samples: Sequence[Sample], born: int) -> None:
    """Refuse tokens, put in by a function, of weights that are older than the group's start, version `born`."""
    for sample in samples:
        versions = trained_versions(sample)
        if len(versions) and versions.min() < born:
            raise HookError(
                f"--max-staleness: sample {sample.index} has a token of version {versions.min()}, but its prompt was"
                f" begun under version {born}; a function must bring tokens of now",
                [sample],
            )


def check_bound(groups: Sequence[Sequence[Sample]], version: int, knobs: Knobs) -> None:
    """Hold every sample and token that is about to be trained to --max-staleness; a function may break it."""
    num_fetches = knobs.fetches_per_push
    for sample in (sample for group in groups for sample in group):
        versions = trained_versions(sample)
        if len(versions) and version // num_fetches - versions.min() // num_fetches > knobs.max_staleness:
            raise HookError(
                f"--max-staleness {knobs.max_staleness}: sample {sample.index} has a token of version"
                f" {versions.min()}, and version {version} would train it",
                [sample],
            )


@dataclass
class StepStaleness:
    """Counts over the shards of a rollout, of which each is added once.

    newest         version of the weights that train it: rollouts that have trained them
    num_untrained  first rollouts of the run that do not train the policy (--num-critic-only-steps)
    """

    newest: int
    num_untrained: int = 0
    num_tokens: int = 0
    total: float = 0.0
    most: int = 0

    @classmethod
    def of(cls, newest: int, config: Config) -> StepStaleness:
        has_critic = estimator_of(config.algorithm).role == "critic"
        return cls(newest, config.critic.num_critic_only_steps if has_critic else 0)

    def add(self, shard: TrainShard) -> None:
        """Count the trained tokens of a shard. A token trained in the first step by the weights that sampled it is 0
        steps old. Steps that were skipped count.
        """
        versions = shard.fields.get("weight_versions")
        if versions is None or self.newest < self.num_untrained:
            return
        step_of = np.full(shard.num_samples, -1, np.int64)
        for index, step in enumerate(shard.steps):
            step_of[[i for group in step.micro_batches for i in group]] = index
        index_of = np.repeat(step_of, shard.response_lengths)
        counts = (shard.fields["loss_mask"] > 0) & (versions != UNKNOWN_VERSION) & (index_of >= 0)
        sampled = np.maximum(versions[counts].astype(np.int64), self.num_untrained)
        ages = np.maximum(self.newest - sampled, 0) * len(shard.steps) + index_of[counts]
        self.num_tokens += len(ages)
        self.total += float(ages.sum())
        self.most = max(self.most, int(ages.max(initial=0)))

    def metrics(self) -> dict[str, float]:
        """Return mean and maximum over tokens; nothing where no version is known."""
        if not self.num_tokens:
            return {}
        return {
            "rollout/steps_since_sampled/mean": self.total / self.num_tokens,
            "rollout/steps_since_sampled/max": float(self.most),
        }


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
