"""Facts of a rollout for the driver: those that warnings need, and some samples to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fusionrl.buffer.training_samples import best_and_worst
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.sample import REWARD_LOST, Sample, Status, lacks_reward, trained_amount
from fusionrl.data.sampling import CHANGED
from fusionrl.observe.advice import Glimpse, RolloutFacts
from fusionrl.observe.safe_text import ending, shorten
from fusionrl.rollout.types import NO_ROOM_AFTER

_SHOWN = 1000  # characters of a text that go to the driver
_EQUAL = 1e-8  # rewards closer than this are equal, as in `rollout_metrics`


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
    equal = [groups[name] for name, values in scored.items() if not values or max(values) - min(values) < _EQUAL]
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
    places = [*spread(len(samples), config.run.log_samples), *([] if example is None else [example])]
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


def spread(num_samples: int, count: int) -> list[int]:
    count = min(count, num_samples)
    return [i * num_samples // count for i in range(count)]


def glimpse(sample: Sample, reward: float) -> Glimpse:
    """Return what a line about a sample shows."""
    return Glimpse(
        index=sample.index,
        prompt=ending(prompt_text(sample.prompt), _SHOWN),
        response=shorten(str(sample.response), _SHOWN),
        label=None if sample.label is None else shorten(str(sample.label), _SHOWN),
        reward=float(reward),
        response_length=sample.response_length,
        status=getattr(sample.status, "value", str(sample.status)),  # a user's function may set plain text
    )


def prompt_text(prompt: object) -> str:
    """A prompt as text; of messages each one's role and content on lines of its own."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        return str(prompt)
    parts = [m if isinstance(m, dict) else {"content": m} for m in prompt]
    return "\n".join(f"{part.get('role', '')}: {part.get('content', '')}" for part in parts)


def _example(samples: Sequence[Sample], equal: list[list[int]]) -> int | None:
    """The sample that a warning shows: of an equal group, if there is one, and of the status that is most common."""
    candidates = [i for group in equal for i in group] or list(range(len(samples)))
    common = Counter(samples[i].status for i in candidates).most_common(1)
    return next((i for i in candidates if samples[i].status == common[0][0]), None)
