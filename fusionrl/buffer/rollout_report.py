"""The report stage: numbers, facts and a few samples of a rollout, for metrics.jsonl, warnings and the console."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fusionrl.buffer.eval_metrics import ACCURATE
from fusionrl.buffer.hook_border import HookBorder
from fusionrl.buffer.rollout_facts import rollout_facts
from fusionrl.buffer.token_metrics import token_numbers, training_version
from fusionrl.buffer.training_samples import TrainingSamples
from fusionrl.config.config import Config
from fusionrl.data.attempts import attempt_shares, attempts_of
from fusionrl.data.sample import Sample, Status, lacks_reward
from fusionrl.data.sample_fields import SpecInfo
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.rewards.code_run import REASONS
from fusionrl.rewards.dispatch import take_lost
from fusionrl.rollout.time_limit import TIMED_OUT
from fusionrl.rollout.types import SESSION

Report = tuple[dict[str, float], int | None, RolloutFacts | None, list[Glimpse]]


def report(
    rollout_id: int,
    scored: TrainingSamples,
    metrics: dict[str, float],
    pushed_version: int | None,
    since: float,
    config: Config,
    border: HookBorder,
) -> Report:
    """Return metrics, the version of the weights that will train (None: unknown), facts and some samples of a rollout.

    A user's function may report in place of the usual metrics; --mode sft has neither facts nor samples.

    metrics         those of the rollout function's own; they are kept
    pushed_version  as `training_version` takes it
    since           when the rollout began, by `time.monotonic`
    """
    samples, raw = scored.samples, scored.raw
    if config.run.mode == "sft":
        return metrics | {"rollout/num_samples": float(len(samples))}, None, None, []
    base_metrics = rollout_metrics(samples, raw)
    sets = set_metrics(samples, raw) if len(config.data.prompt_data or []) > 1 else {}
    version = training_version(samples, pushed_version)
    staleness, distance = token_numbers(samples, version)
    log = border.hook("custom_rollout_log_function_path")
    if log is None or not log(rollout_id, border.args(), samples, metrics, time.monotonic() - since):
        metrics |= base_metrics | distance
    else:
        metrics |= {name: base_metrics[name] for name in ("rollout/num_samples", "rollout/num_tokens")}
    metrics |= sets | staleness
    metrics |= {f"rollout/reward_{reason}": float(count) for reason, count in take_lost().items()}
    facts, glimpses = rollout_facts(config, samples, raw, scored.rewards)
    return metrics, version, facts, glimpses


def rollout_metrics(samples: Sequence[Sample], raw: Sequence[float]) -> dict[str, float]:
    """Means over the samples of one rollout, those of rewards over its attempts; equal groups; counts."""
    rewards = np.asarray(raw, np.float64)
    attempts = attempts_of(samples)
    shares = attempt_shares(attempts)
    mean = float(np.average(rewards, weights=shares))
    group_index = np.array([-1 if s.group_index is None else s.group_index for s in samples])
    lengths = np.array([s.response_length for s in samples])
    scored = np.array([not lacks_reward(s) for s in samples], bool)
    groups = [rewards[(group_index == g) & scored] for g in np.unique(group_index)]
    parts: dict[str, list[float]] = {}  # of a weighted sum in --rm-type
    for name, value in (item for graded in _entries(samples, "rewards") for item in graded.items()):
        if isinstance(value, float):
            parts.setdefault(name, []).append(value)
    return {
        **{f"rollout/reward_{name}": float(np.mean(values)) for name, values in parts.items()},
        **_code_failures(samples),
        **_timed_out(samples),
        **_rewritten(samples),
        **_drafts(samples),
        "rollout/raw_reward": mean,
        "rollout/raw_reward_std": float(np.sqrt(np.average((rewards - mean) ** 2, weights=shares))),
        "rollout/accuracy": float(np.average(rewards >= ACCURATE, weights=shares)),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/truncated_ratio": float(np.mean([s.status == Status.TRUNCATED for s in samples])),
        "rollout/failed": float(sum(s.status in (Status.FAILED, Status.ABORTED) for s in samples)),
        "rollout/zero_std_groups": float(np.mean([not g.size or np.ptp(g) < 1e-8 for g in groups])),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_attempts": float(len(set(attempts.tolist()))),
        "rollout/num_tokens": float(lengths.sum()),
    }


def _entries(samples: Sequence[Sample], name: str) -> list[dict[str, object]]:
    """The dictionaries of this name in samples' metadata; a user's data may have another column of that name."""
    values = ((sample.metadata or {}).get(name) for sample in samples)
    return [value for value in values if isinstance(value, dict)]


def _timed_out(samples: Sequence[Sample]) -> dict[str, float]:
    """How many samples passed --sample-timeout, where any did."""
    count = sum(TIMED_OUT in (sample.metadata or {}) for sample in samples)
    return {"rollout/timed_out": float(count)} if count else {}


def _code_failures(samples: Sequence[Sample]) -> dict[str, float]:
    """Per reason for which programs failed tests (`code_run.REASONS`): how many samples have such a test."""
    reasons = _entries(samples, "code_failures")
    counts = Counter(name for failed in reasons for name in failed if name in REASONS)
    return {f"rollout/code_failed/{name}": float(count) for name, count in counts.items()}


def _rewritten(samples: Sequence[Sample]) -> dict[str, float]:
    """Segments beyond the first of a session: histories that an agent rewrote. Empty where no sample has a session."""
    numbers = [number for entry in _entries(samples, SESSION) if isinstance(number := entry.get("segment"), int)]
    return {"rollout/session_rewrites": float(sum(number > 0 for number in numbers))} if numbers else {}


def _drafts(samples: Sequence[Sample]) -> dict[str, float]:
    """How many drafted tokens the model took, and how many tokens it made at a time; empty where no engine drafts."""
    total = SpecInfo()
    for sample in samples:
        for name, count in vars(sample.spec_info).items():
            setattr(total, name, getattr(total, name) + count)
    if not total.spec_verify_ct:
        return {}
    return {
        "rollout/spec_accept_rate": total.spec_accept_rate,
        "rollout/spec_accept_length": total.spec_accept_length,
    }


def set_metrics(samples: Sequence[Sample], raw: Sequence[float]) -> dict[str, float]:
    """Per set of a mixture (`metadata["data_source"]`): mean raw reward, accuracy, number of samples."""
    sets: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        name = sample.metadata.get("data_source")
        if name is not None:
            sets.setdefault(str(name), []).append(position)
    out: dict[str, float] = {}
    rewards, shares = np.asarray(raw, np.float64), attempt_shares(attempts_of(samples))
    for name, members in sets.items():
        member_rewards, weights = rewards[members], shares[members]
        out[f"rollout/{name}/raw_reward"] = float(np.average(member_rewards, weights=weights))
        out[f"rollout/{name}/accuracy"] = float(np.average(member_rewards >= ACCURATE, weights=weights))
        out[f"rollout/{name}/num_samples"] = float(len(members))
    return out
