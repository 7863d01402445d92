"""Samples → train shards: one balanced shard per data-parallel rank.

Every rank gets as many micro-batches in each optimizer step; the counts over which a loss is averaged are those of the
whole step, so that no split changes the loss. A sample that a filter removed counts too: with `sequence_mean` and
`constant` the gradient of the others does not grow when more are removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fusionrl.base.process import give_freed_back
from fusionrl.config.config import Config
from fusionrl.config.run_parts import estimator_of
from fusionrl.data.image_store import IMAGES
from fusionrl.data.sample import Sample, Status, response_mask, trained_amount
from fusionrl.data.sample_fields import UNKNOWN_VERSION, temperatures_of
from fusionrl.data.train_batch import FIELDS, ShardSpan, TrainShard, TrainStep, attempts_of, flat_field
from fusionrl.plan.balance import Balance, BatchPlan, divide
from fusionrl.plan.plan import Plan

Ref = TypeVar("Ref")  # a reference to a shard in the object store
PACKED_AT_ONCE = 512  # samples; what is converted of them is in memory twice for a moment


@dataclass
class TrainingSamples:
    """Samples in the order in which they are trained on, with their rewards and a user's columns.

    rewards      [n] what is trained on: with penalties for length, normalised over each group where the estimator says
                 so
    raw          [n] as the reward function gave them; 0 for a sample without one
    extra        a user's columns: one value a sample
    by_groups    no optimizer step begins within a group
    has_indices  the samples are those of the rollout, or others that have their indices
    """

    samples: list[Sample]
    rewards: list[float]
    raw: list[float]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    by_groups: bool = False
    has_indices: bool = True


def cut(
    chosen: TrainingSamples,
    plan: Plan,
    rollout_id: int,
    version: int | None,
    put: Callable[[TrainShard], Ref],
    ages: StepStaleness | None = None,
    temperature: float | None = None,
    adapter: str | None = None,
    first: int = 0,
) -> tuple[list[Ref], list[Ref]]:
    """Cut the samples into shards as the plan divides them: for the actor's ranks, and for those of the critic or
    process reward model, which get the same samples. Takes the samples out of `chosen`.

    version      of the weights that will train: tokens that older ones sampled are marked (field `current`)
    put          puts a shard where trainers can pull it; no name holds a shard while the next one is made
    ages         counts the actor's shards
    temperature  --rollout-temperature: tokens that were sampled at another are marked (field `temperatures`)
    adapter      of several: the one that learns from these samples
    first        place of the first sample in the rollout
    """
    assert plan.balance is not None and plan.batch is not None
    named: dict[str, Any] = {"rollout_id": rollout_id, "weight_version": version, "temperature": temperature}
    named |= {"adapter": adapter, "first": first}
    auxiliary: list[Ref] = []
    if (aux_plan := plan.auxiliary) is not None:
        assert aux_plan.batch is not None
        copied = replace(chosen, samples=list(chosen.samples))
        auxiliary = [put(shard) for shard in take_shards(copied, aux_plan.batch, aux_plan.balance, **named)]
    batch = plan.batch if adapter is None else batch_of(chosen.samples, plan.batch)

    def counted(shard: TrainShard) -> Ref:
        if ages is not None:
            ages.add(shard)
        return put(shard)

    return [*map(counted, take_shards(chosen, batch, plan.balance, freed=give_freed_back, **named))], auxiliary


def batch_of(samples: Sequence[Sample], plan: BatchPlan) -> BatchPlan:
    """Return the division of one adapter's samples of a rollout, as of a run of its own with as many prompts a rollout.

    It takes as many optimizer steps as the plan's rollout, or one for each group where it has fewer.
    """
    if not samples:
        return plan
    num_groups = int(_Sizes.of(samples).groups[-1]) + 1
    num_steps, count = min(plan.num_steps, num_groups), num_groups * plan.num_samples_per_prompt
    return replace(plan, num_prompts=num_groups, num_steps=num_steps, global_batch_size=count // num_steps)


def take_shards(
    chosen: TrainingSamples,
    plan: BatchPlan,
    balance: Balance,
    *,
    rollout_id: int,
    weight_version: int | None = None,
    temperature: float | None = None,
    adapter: str | None = None,
    first: int = 0,
    freed: Callable[[], None] | None = None,
) -> Iterator[TrainShard]:
    """Cut a rollout into `plan.num_steps` optimizer steps and each step over `plan.dp_size` ranks; yield rank by rank.

    Siblings of one group are adjacent, and stay in one step if its size allows it. Takes the samples out of the list,
    so that memory holds them once: a packed sample is replaced by an empty one, and `freed` is called after some
    hundreds. Every error except a failed cast is raised before the first is taken. The other arguments are `cut`'s.

    Raises:
        ValueError: fewer groups than optimizer steps, a sample whose lengths do not agree, or one that is longer than a
            micro-batch may be.
    """
    samples = chosen.samples
    sizes = _Sizes.of(samples)
    present = _present(samples, sizes)
    per_rank, steps = _plan_steps(sizes, [s.index for s in samples], plan, balance, chosen.by_groups)
    columns: dict[str, Sequence[Any]] = {"rewards": chosen.rewards, "raw_rewards": chosen.raw}
    current = [] if weight_version is None else [is_current(sample, weight_version) for sample in samples]
    if not all(tokens.all() for tokens in current):  # else the field says nothing, and is left out
        columns["current"], present["current"] = current, ()
    if sizes.has_fan_out:
        columns["attempt_tokens"] = np.bincount(sizes.attempts, sizes.trained)[sizes.attempts].tolist()
        present["attempt_tokens"] = ()
    if temperature is not None:
        hot = [temperatures_of(sample, temperature) for sample in samples]
        if any(values is not None for values in hot):
            plain = [np.full(sample.response_length, temperature, np.float32) for sample in samples]
            columns["temperatures"] = [p if h is None else h for p, h in zip(plain, hot, strict=True)]
            present["temperatures"] = ()
    for members, own_steps in zip(per_rank, steps, strict=True):
        shard = _take_shard(chosen, members, columns, present, rollout_id, own_steps, freed)
        shard.fields["position"] += first
        shard.adapter = adapter
        yield shard


@dataclass(frozen=True)
class _Sizes:
    """Numbers of n samples, from which the division into steps, ranks and micro-batches follows.

    lengths, responses  [n] tokens of the sample, and of its response
    trained  [n] tokens that are trained on
    groups   [n] the run of samples of one group, side by side, that the sample is of: 0, 1, …
    attempts [n] the attempt that the sample is of
    images   [n] key of an image → its tokens; [] where no sample has one
    """

    lengths: np.ndarray
    responses: np.ndarray
    trained: np.ndarray
    groups: np.ndarray
    attempts: np.ndarray
    images: list[dict[str, int]]

    @property
    def has_fan_out(self) -> bool:
        return bool(self.attempts.size) and int(self.attempts.max()) + 1 < self.attempts.size

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Sizes:
        for sample in samples:
            sample.validate()
        numbers = [sample.group_index for sample in samples]
        first = [i == 0 or number is None or number != numbers[i - 1] for i, number in enumerate(numbers)]
        images = [{image.key: image.num_tokens for _, image in sample.image_spans} for sample in samples]
        return cls(
            np.array([sample.num_tokens for sample in samples], np.int64),
            np.array([sample.response_length for sample in samples], np.int64),
            np.array([trained_amount(sample) for sample in samples], np.float64),
            np.cumsum(first) - 1,
            attempts_of(samples),
            images if any(images) else [],
        )


def _plan_steps(
    sizes: _Sizes, indices: Sequence[int | None], plan: BatchPlan, balance: Balance, by_groups: bool
) -> tuple[list[list[int]], list[list[TrainStep]]]:
    bounds = _step_bounds(sizes, plan, by_groups)
    _check_lengths(sizes, indices, balance)
    per_rank: list[list[int]] = [[] for _ in range(plan.dp_size)]
    steps: list[list[TrainStep]] = [[] for _ in range(plan.dp_size)]
    for first, end in itertools.pairwise(bounds):
        lengths = sizes.lengths[first:end]
        prompts, siblings = lengths - sizes.responses[first:end], _siblings(sizes.groups[first:end])
        num_tokens = int(np.floor(sizes.trained[first:end]).sum())
        num_attempts = len(np.unique(sizes.attempts[first:end]))
        images = sizes.images[first:end]
        for rank, bins in enumerate(divide(lengths, prompts, siblings, plan.dp_size, balance, images)):
            members = sorted(i for b in bins for i in b)
            local = {position: len(per_rank[rank]) + i for i, position in enumerate(members)}
            steps[rank].append(TrainStep([[local[i] for i in b] for b in bins], num_tokens, num_attempts))
            per_rank[rank] += [first + i for i in members]
    return per_rank, steps


def _step_bounds(sizes: _Sizes, plan: BatchPlan, by_groups: bool) -> list[int]:
    """Return the position at which each optimizer step begins, and the end of the last one.

    A user's functions may make several samples for one prompt, or fewer prompts; then all steps have as many groups.
    """
    count = len(sizes.lengths)
    if count == plan.num_steps * plan.global_batch_size and not by_groups and not sizes.has_fan_out:
        return [step * plan.global_batch_size for step in range(plan.num_steps + 1)]
    starts = [group[0] for group in _siblings(sizes.groups)]
    if len(starts) < plan.num_steps:
        raise ValueError(
            f"the rollout has {len(starts)} groups of samples for {plan.num_steps} optimizer steps "
            "(--num-steps-per-rollout); return more groups, or lower it"
        )
    return [starts[step * len(starts) // plan.num_steps] for step in range(plan.num_steps)] + [count]


def _check_lengths(sizes: _Sizes, indices: Sequence[int | None], balance: Balance) -> None:
    padded, within = balance.padded(sizes.lengths), balance.dense_within
    if within is not None and int(sizes.lengths.max(initial=0)) > within:
        longest = int(sizes.lengths.argmax())
        raise ValueError(
            f"sample {indices[longest]} has {sizes.lengths[longest]} tokens, over the {within} (index_topk) up to which"
            " this model attends to all, as trainers do; bound the length with --rollout-max-context-len"
        )
    if int(padded.max(initial=0)) > balance.max_tokens:
        longest = int(padded.argmax())
        raise ValueError(
            f"sample {indices[longest]} has {sizes.lengths[longest]} tokens ({padded[longest]} with padding), over the "
            f"{balance.max_tokens} of a micro-batch (--max-tokens-per-gpu x --context-parallel-size); raise "
            "--max-tokens-per-gpu, or bound the length with --rollout-max-context-len"
        )


def _siblings(groups: np.ndarray) -> list[list[int]]:
    """Positions, group by group: samples of one group that stand side by side."""
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    return [list(range(first, end)) for first, end in itertools.pairwise([*starts.tolist(), len(groups)])]


def _present(samples: Sequence[Sample], sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    """Return the fields of the shards, and the dimensions behind the first; a field is in every shard or in none.

    A sample that trains nothing does not need a field that may be missing. Versions are there where any sample has
    them: the others' are unknown.
    """
    needed = [sample for sample, trained in zip(samples, sizes.trained, strict=True) if trained]

    def is_whole(name: str) -> bool:
        enough = any if name == "weight_versions" else all
        return enough(vars(sample).get(name) is not None for sample in needed)

    names = [name for name, spec in FIELDS.items() if spec.required or (not spec.is_derived and is_whole(name))]
    return {name: _trailing(samples, name) for name in names}


def _trailing(samples: Sequence[Sample], name: str) -> tuple[int, ...]:
    """The dimensions of a field behind the first, which all samples must share."""
    count = FIELDS[name].trailing
    if not count:
        return ()
    shapes = {np.shape(value)[1:]: s.index for s in samples if (value := vars(s)[name]) is not None}
    for shape, index in shapes.items():
        if len(shape) != count or len(shapes) > 1:
            other_shapes = f"; others have {', '.join(str(s) for s in shapes if s != shape)}" if len(shapes) > 1 else ""
            raise ValueError(
                f"sample {index}: {name} has {shape} values a token{other_shapes}; expected {FIELDS[name].description}"
            )
    return next(iter(shapes), (0,) * count)


def _take_shard(
    chosen: TrainingSamples,
    members: Sequence[int],
    derived: dict[str, Sequence[object]],
    present: dict[str, tuple[int, ...]],
    rollout_id: int,
    steps: list[TrainStep],
    freed: Callable[[], None] | None,
) -> TrainShard:
    """One rank's shard, of the samples at `members`; `derived` holds fields that are not read off the samples.

    present  each field's dimensions behind that over which it runs
    """
    samples = chosen.samples
    total = np.array([samples[i].num_tokens for i in members], np.int32)
    responses = np.array([samples[i].response_length for i in members], np.int32)
    sizes = {"token": int(total.sum()), "response": int(responses.sum()), "sample": len(members)}
    fields: dict[str, np.ndarray] = {
        name: np.empty((sizes[FIELDS[name].extent], *trailing), FIELDS[name].dtype)
        for name, trailing in present.items()
    }
    ends = dict.fromkeys(present, 0)
    metadata, blank = [], Sample()
    spans, images = list[list[ShardSpan]](), dict[str, np.ndarray]()
    for first in range(0, len(members), PACKED_AT_ONCE):
        packed = members[first : first + PACKED_AT_ONCE]
        taken = [samples[i] for i in packed]
        for name in present:
            values = [derived[name][i] for i in packed] if name in derived else _values(name, taken, present[name])
            part = flat_field(name, values)
            fields[name][ends[name] : ends[name] + len(part)] = part
            ends[name] += len(part)
        spans += [_shard_spans(sample) for sample in taken]
        for image in [image for sample in taken for _, image in sample.image_spans]:
            if image.key not in images:  # siblings have the same
                images[image.key] = IMAGES.pixels(image)
        metadata += [s.train_metadata if s.train_metadata is not None else s.metadata for s in taken]
        for i in packed:
            samples[i] = blank
        del taken, values
        if freed is not None:
            freed()
    columns = {name: [values[i] for i in members] for name, values in chosen.extra.items()}
    fields["position"] = np.asarray(members, np.int64)
    return TrainShard(rollout_id, total, responses, fields, steps, metadata, columns, spans if images else [], images)


def _shard_spans(sample: Sample) -> list[ShardSpan]:
    if not sample.image_spans:
        return []
    assert IMAGES.processor is not None, "the store was not told the model's settings of images"
    limits = IMAGES.processor.limits
    return [(first, image.key, limits.grid(image)) for first, image in sample.image_spans]


def _values(name: str, samples: list[Sample], trailing: tuple[int, ...]) -> list[object]:
    match name:
        case "sample_index":
            return [-1 if s.index is None else s.index for s in samples]
        case "group_index":
            return [-1 if s.group_index is None else s.group_index for s in samples]
        case "truncated":
            return [s.status == Status.TRUNCATED for s in samples]
        case "rollout_routed_experts":
            return [_of_all_tokens(s.rollout_routed_experts, s.num_tokens, trailing) for s in samples]
        case "loss_mask":
            return [response_mask(s) for s in samples]
    values = [vars(s).get(name) for s in samples]
    missing = UNKNOWN_VERSION if name == "weight_versions" else 0
    return [np.full(s.response_length, missing) if v is None else v for s, v in zip(samples, values, strict=True)]


def _of_all_tokens(experts: np.ndarray | None, num_tokens: int, trailing: tuple[int, ...]) -> np.ndarray:
    """With the last token, which no engine runs over, where it is missing: -1."""
    padded = np.full((num_tokens, *trailing), -1, np.int16)
    if experts is not None:
        padded[: len(experts)] = experts
    return padded


METRICS = """
rollout/steps_since_sampled/mean | steps | Optimizer steps between the weights that sampled a trained token and those
    that train it, mean over the tokens. Of a rollout's n steps the first trains tokens of the newest push at 0, the
    last at n - 1. | known weight versions, --mode rl
rollout/steps_since_sampled/max | steps | The same of the oldest token. | known weight versions, --mode rl
"""


@dataclass
class StepStaleness:
    """Counts over the shards of a rollout, of which each is added once."""

    newest: int  # version of the weights that train it: rollouts that have trained them
    num_untrained: int = 0  # first rollouts of the run that do not train the policy (--num-critic-only-steps)
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


def is_current(sample: Sample, version: int) -> np.ndarray:
    """[response_length] bool: False where weights that are known to be older than `version` sampled the token."""
    versions = sample.array("weight_versions")
    if versions is None:
        return np.ones(sample.response_length, bool)
    return (versions >= version) | (versions == UNKNOWN_VERSION)
