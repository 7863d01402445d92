"""The report stage: numbers, facts and a few samples of a rollout, for metrics.jsonl, warnings and the console."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fusionrl.buffer.collect import HookBorder
from fusionrl.buffer.train_shards import TrainingSamples
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import REWARD_LOST, Sample, Status, is_trained_on, lacks_reward, response_mask, trained_amount
from fusionrl.data.sample_fields import CHANGED, UNKNOWN_VERSION, SpecInfo
from fusionrl.data.train_batch import attempts_of
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.observe.formats import as_text, ending, shorten
from fusionrl.rewards.dispatch import EQUAL, lost_metrics, mean_metrics, metadata_entries, reward_metrics
from fusionrl.rollout.generate_state import TIMED_OUT
from fusionrl.rollout.types import NO_ROOM_AFTER, SESSION

Report = tuple[dict[str, float], RolloutFacts | None, list[Glimpse]]


def report(
    rollout_id: int,
    scored: TrainingSamples,
    metrics: dict[str, float],
    pushed_version: int | None,
    since: float,
    config: Config,
    border: HookBorder,
) -> Report:
    """Return metrics, facts and some samples of a rollout.

    A user's function may report in place of the usual metrics; --mode sft has neither facts nor samples.

    metrics         those of the rollout function's own; they are kept
    pushed_version  as `training_version` takes it
    since           when the rollout began, by `time.monotonic`
    """
    samples, raw = scored.samples, scored.raw
    if config.run.mode == "sft":
        return metrics | {"rollout/num_samples": float(len(samples))}, None, []
    base_metrics = rollout_metrics(samples, raw)
    sets = set_metrics(samples, raw) if len(config.data.prompt_data or []) > 1 else {}
    version = training_version(samples, pushed_version)
    staleness, distance = token_metrics(samples, version)
    log = border.hook("custom_rollout_log_function_path")
    if log is None or not log(rollout_id, border.args(), samples, metrics, time.monotonic() - since):
        metrics |= base_metrics | distance
    else:
        metrics |= {name: base_metrics[name] for name in ("rollout/num_samples", "rollout/num_tokens")}
    metrics |= sets | staleness
    metrics |= lost_metrics()
    facts, glimpses = rollout_facts(config, samples, raw, scored.rewards)
    return metrics, facts, glimpses


METRICS = """
rollout/response_len/mean | tokens | Mean length of the responses, tools' tokens included.
rollout/response_len/max | tokens | Length of the longest response, tools' tokens included.
rollout/truncated_ratio | share | Share of responses that were cut off by the length limit.
rollout/failed | samples | Samples that failed or were aborted; they are not trained on.
rollout/timed_out | samples | Samples that passed the time limit; they failed. | --sample-timeout
rollout/num_samples | samples | Samples of the rollout.
rollout/num_attempts | attempts | Attempts of the rollout: samples that share a rollout_id are one.
rollout/num_tokens | tokens | Response tokens of the rollout, tools' tokens included.
rollout/session_rewrites | segments | Samples that began where an agent behind the session proxy rewrote its history
    (docs/guides/agents.md). | --agent-path
rollout/spec_accept_rate | share | Drafted tokens that the model took, of all that were drafted
    (docs/guides/engines.md). | --sglang-speculative-algorithm
rollout/spec_accept_length | tokens | Mean number of tokens that an engine's forward pass made of a response, the
    drafted ones included. | --sglang-speculative-algorithm
rollout/opd_reverse_kl | nats | Mean over trained tokens of log p(engine) - log p(teacher): an estimate of KL(policy
    || teacher). | samples with teacher_log_probs
rollout/staleness/token_mean | rollouts | Staleness of a trained token: rollouts trained between the weights that
    sampled it and those that train on it; 0 where they are the same. Mean over the trained tokens. | known weight
    versions
rollout/staleness/token_max | rollouts | Staleness of the oldest trained token. | known weight versions
rollout/staleness/sample_mean | rollouts | Mean over the samples; a sample is as stale as its oldest trained token. |
    known weight versions
rollout/staleness/sample_max | rollouts | As rollout/staleness/token_max. | known weight versions
rollout/staleness/tokens/<k> | share | Share of trained tokens with staleness k; 8 also counts what is older. | known
    weight versions, where there are such tokens; k = 0 always
rollout/staleness/samples/<k> | share | Share of samples with staleness k; 8 also counts what is older. | known weight
    versions, where there are such samples; k = 0 always
rollout/staleness/unknown | share | Share of trained tokens whose weight version is not known; the metrics above leave
    them out. | when it happens
"""


def rollout_metrics(samples: Sequence[Sample], raw: Sequence[float]) -> dict[str, float]:
    """Metrics of rewards, means over the samples of one rollout, counts."""
    lengths = np.array([s.response_length for s in samples])
    return {
        **reward_metrics(samples, raw),
        **_occasional_metrics(samples),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/truncated_ratio": float(np.mean([s.status == Status.TRUNCATED for s in samples])),
        "rollout/failed": float(sum(s.status in (Status.FAILED, Status.ABORTED) for s in samples)),
        "rollout/num_attempts": float(len(set(attempts_of(samples).tolist()))),
        "rollout/num_tokens": float(lengths.sum()),
    }


def _occasional_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return numbers of what few runs have: time-outs, rewritten histories, drafts, images."""
    metrics: dict[str, float] = {}
    if num_timed_out := sum(TIMED_OUT in (sample.metadata or {}) for sample in samples):
        metrics["rollout/timed_out"] = float(num_timed_out)
    segments = [
        number for entry in metadata_entries(samples, SESSION) if isinstance(number := entry.get("segment"), int)
    ]
    if segments:
        metrics["rollout/session_rewrites"] = float(sum(number > 0 for number in segments))
    drafts = SpecInfo()
    for sample in samples:
        for name, count in vars(sample.spec_info).items():
            setattr(drafts, name, getattr(drafts, name) + count)
    if drafts.spec_verify_ct:
        metrics["rollout/spec_accept_rate"] = drafts.spec_accept_rate
        metrics["rollout/spec_accept_length"] = drafts.spec_accept_length
    if IMAGES.processor is not None:
        from fusionrl.rollout.image_requests import image_metrics

        metrics |= image_metrics(samples)
    return metrics


def set_metrics(samples: Sequence[Sample], raw: Sequence[float]) -> dict[str, float]:
    """Per set of a mixture (`metadata["data_source"]`): mean raw reward, accuracy, number of samples."""
    sets: dict[str, list[int]] = {}
    for position, sample in enumerate(samples):
        name = sample.metadata.get("data_source")
        if name is not None:
            sets.setdefault(str(name), []).append(position)
    out: dict[str, float] = {}
    for name, members in sets.items():
        out |= mean_metrics(f"rollout/{name}", [samples[i] for i in members], [raw[i] for i in members])
    return out


_SHOWN = 1000  # characters of a text that go to the driver


def rollout_facts(
    config: Config, samples: Sequence[Sample], raw: Sequence[float], rewards: Sequence[float]
) -> tuple[RolloutFacts, list[Glimpse]]:
    """Facts of one rollout, and --log-samples of its samples, spread evenly.

    raw      [n] rewards as the reward function gave them
    rewards  [n] what is trained on: penalties for length are in them, and for most estimators they are advantages
    """
    groups: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(i)
    scored = {name: [raw[i] for i in members if not lacks_reward(samples[i])] for name, members in groups.items()}
    equal = [groups[name] for name, values in scored.items() if not values or max(values) - min(values) < EQUAL]
    judged = [value for values in scored.values() for value in values]
    longest, most = config.rollout.rollout_max_response_len, config.rollout.rollout_max_context_len
    truncated = [s for s in samples if s.status == Status.TRUNCATED]
    example = _example(samples, equal)
    lost = [sample.metadata.get(REWARD_LOST) for sample in samples if isinstance(sample.metadata, dict)]
    is_rl = config.run.mode == "rl"
    changed = [names for sample in samples if is_rl and (names := (sample.metadata or {}).get(CHANGED))]
    trained = np.array([trained_amount(sample) > 0 for sample in samples], bool)
    facts = RolloutFacts(
        num_samples=len(samples),
        num_groups=len(groups),
        num_equal_groups=len(equal),
        num_same_text=sum(len(g) > 1 and len({str(samples[i].response) for i in g}) == 1 for g in groups.values()),
        num_trained=int(trained.sum()),
        num_failed=sum(s.status in (Status.FAILED, Status.ABORTED) for s in samples),
        num_truncated=len(truncated),
        num_at_response_limit=sum(longest is not None and s.response_length >= longest for s in truncated),
        num_at_context_limit=sum(most is not None and s.num_tokens >= most for s in truncated),
        num_without_label=sum(s.label is None or (isinstance(s.label, str) and not s.label) for s in samples),
        num_no_second_turn=sum((s.metadata or {}).get(NO_ROOM_AFTER) == 1 for s in samples),
        teaches_nothing=teaches_nothing(config, samples, rewards, trained),
        lowest=float(min(judged, default=0.0)),
        highest=float(max(judged, default=0.0)),
        num_timeouts=lost.count("timeout"),
        num_crashes=lost.count("crash"),
        num_changed=len(changed),
        changed_by=tuple(sorted({name for names in changed for name in names})),
        num_errors=lost.count("error"),
    )
    count = min(config.run.log_samples, len(samples))
    places = [*(i * len(samples) // count for i in range(count)), *([] if example is None else [example])]
    glimpses = [glimpse(samples[i], raw[i]) for i in places]
    return (facts, glimpses) if example is None else (replace(facts, example=glimpses.pop()), glimpses)


def teaches_nothing(config: Config, samples: Sequence[Sample], rewards: Sequence[float], trained: np.ndarray) -> bool:
    """Return whether all advantages are 0, as far as they are known before the trainers have seen the rollout.

    rewards  [n] what is trained on
    trained  [n] whether any token of the sample is

    Estimators that compare the answers to one prompt, and remax, have their advantages in `rewards`. Whitening also
    takes away what all tokens share. reinforce_plus_plus whitens the discounted rewards of the whole rollout: equal
    groups teach if they differ from each other, and a discount or a price for KL makes tokens differ. ppo's critic,
    prime's reward model, a teacher (--use-opd) and a user's functions give advantages of their own.
    """
    algorithm, estimator = config.algorithm, estimator_of(config.algorithm)
    if config.run.mode != "rl" or algorithm.loss_type != "policy_loss" or _has_own_advantages(config):
        return False
    values = np.asarray(rewards, np.float64)[trained]
    if not values.size:
        return True
    if algorithm.policy_loss == "dpo":
        return not best_and_worst(samples, rewards)
    if algorithm.use_opd or estimator.role == "critic":
        return False
    if estimator.role == "prm" and config.prm.prm_process_coef != 0:
        return False
    tiny = 1e-12 * max(1.0, float(np.abs(values).max()))
    if float(np.abs(values).max()) <= tiny:
        return not ("kl_coef" in estimator.reads and algorithm.kl_coef > 0)
    is_whitened = estimator.is_whitened or algorithm.normalize_advantages
    if estimator.group is None:  # the rewards of tokens are whitened, which a discount or a price makes unequal
        is_whitened = is_whitened and algorithm.gamma == 1.0 and algorithm.kl_coef == 0
    return is_whitened and float(np.ptp(values)) <= tiny


def _has_own_advantages(config: Config) -> bool:
    """Return whether a user's function may make advantages, or a loss that needs none."""
    return any(
        (
            config.reward.custom_convert_samples_to_train_data_path,
            config.train.custom_advantage_function_path,
            config.train.rollout_data_postprocess_path,
            config.algorithm.custom_policy_loss_path,
        )
    )


def glimpse(sample: Sample, reward: float) -> Glimpse:
    """Return what a line about a sample shows."""
    return Glimpse(
        index=sample.index,
        prompt=ending(as_text(sample.prompt), _SHOWN),
        response=shorten(str(sample.response), _SHOWN),
        label=None if sample.label is None else shorten(str(sample.label), _SHOWN),
        reward=float(reward),
        response_length=sample.response_length,
        status=getattr(sample.status, "value", str(sample.status)),  # a user's function may set plain text
    )


def _example(samples: Sequence[Sample], equal: list[list[int]]) -> int | None:
    """The sample that a warning shows: of an equal group, if there is one, and of the status that is most common."""
    candidates = [i for group in equal for i in group] or list(range(len(samples)))
    common = Counter(samples[i].status for i in candidates).most_common(1)
    return next((i for i in candidates if samples[i].status == common[0][0]), None)


LAST_BIN = 8  # of the histogram: it also counts what is older


def training_version(samples: Sequence[Sample], pushed: int | None = None) -> int | None:
    """Return the version of the weights that will train on these samples: of the last push, or if that is not known, as
    for samples read from a file, the newest that sampled any of their tokens; None if no token has a version.
    """
    versions = [sample.array("weight_versions") for sample in samples]
    newest = max((int(v.max()) for v in versions if v is not None and len(v)), default=UNKNOWN_VERSION)
    newest = max(newest, UNKNOWN_VERSION if pushed is None else pushed)
    return None if newest == UNKNOWN_VERSION else newest


def token_metrics(samples: Sequence[Sample], version: int | None) -> tuple[dict[str, float], dict[str, float]]:
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
            counts = np.bincount(np.maximum(version - known, 0)).tolist()
            ages.append(Counter({age: count for age, count in enumerate(counts) if count}))
    # The mean of log p(student) - log p(teacher) estimates their reverse KL (k1).
    all_gaps = np.concatenate([np.zeros(0), *gaps])
    distance = {"rollout/opd_reverse_kl": float(all_gaps.mean())} if all_gaps.size else {}
    return _staleness_metrics(ages, num_unknown), distance


def _staleness_metrics(ages: Sequence[Counter[int]], num_unknown: int) -> dict[str, float]:
    """Mean, maximum and histogram by token, and by sample, each as old as its oldest trained token.

    ages         of each sample: rollouts trained between sampling weights and training weights -> number of tokens
    num_unknown  trained tokens of an unknown version
    """
    ages = [sample_ages for sample_ages in ages if sample_ages]
    if not ages:
        return {}
    tokens, oldest = sum(ages, Counter[int]()), Counter(max(sample_ages) for sample_ages in ages)
    metrics: dict[str, float] = {}
    for counts, mean, most, share in (
        (tokens, "rollout/staleness/token_mean", "rollout/staleness/token_max", "rollout/staleness/tokens/"),
        (oldest, "rollout/staleness/sample_mean", "rollout/staleness/sample_max", "rollout/staleness/samples/"),
    ):
        total = counts.total()
        metrics[mean] = sum(age * count for age, count in counts.items()) / total
        metrics[most] = float(max(counts))
        shares = Counter({0: 0})  # of the ages that occur, and of 0
        for age, count in counts.items():
            shares[min(age, LAST_BIN)] += count
        metrics |= {f"{share}{age}": shares[age] / total for age in sorted(shares)}
    if num_unknown:
        metrics["rollout/staleness/unknown"] = num_unknown / (num_unknown + tokens.total())
    return metrics


def best_and_worst(samples: Sequence[Sample], rewards: Sequence[float]) -> list[tuple[int, int]]:
    """For each group whose rewards differ the positions of its first best and its first worst sample.

    Samples that are not trained on are in no pair.
    """
    groups: dict[int | None, list[int]] = {}
    for i, sample in enumerate(samples):
        if is_trained_on(sample):
            groups.setdefault(sample.group_index, []).append(i)
    pairs = [
        (max(members, key=lambda i: rewards[i]), min(members, key=lambda i: rewards[i])) for members in groups.values()
    ]
    return [(best, worst) for best, worst in pairs if rewards[best] > rewards[worst]]
