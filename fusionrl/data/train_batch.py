"""The train batch: what the Buffer hands to the trainers, declared in one place; and attempts.

A rollout becomes one `TrainShard` per data-parallel rank. Ragged values stand flat, sample after sample, in one
array a field; `FIELDS` says for each field over what it runs. A value that a user's hook adds flows through `metadata`
(one dict a sample) or through a column of its own, `extra`.

An attempt is one of the --n-samples-per-prompt tries at a prompt. Its samples (segments of a conversation, several
agents) share slime's `Sample.rollout_id`. Statistics of a group, denominators of losses and accuracy count attempts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from fusionrl.data.sample import Sample

Extent = Literal["token", "response", "sample"]
# (place of the first placeholder in the sample's tokens, key of the image, its patches as (1, rows, columns))
ShardSpan: TypeAlias = tuple[int, str, tuple[int, int, int]]


@dataclass(frozen=True)
class FieldSpec:
    """Over what a field runs, its type, and whether a shard may lack it."""

    extent: Extent  # token: prompt and response tokens; response: response tokens; sample: one value a sample
    dtype: type
    required: bool
    description: str
    is_derived: bool = False  # no field of a Sample: made of the rollout, or by forward passes of the trainers
    trailing: int = 0  # dimensions behind that over which it runs


FIELDS: dict[str, FieldSpec] = {
    "tokens": FieldSpec("token", np.int32, True, "prompt and response token ids"),
    "loss_mask": FieldSpec("response", np.float32, True, "1 where the token is trained on, else 0"),
    "rollout_log_probs": FieldSpec("response", np.float32, False, "the engine's log-prob of each response token"),
    "teacher_log_probs": FieldSpec("response", np.float32, False, "the teacher's log-prob of each response token"),
    "rollout_routed_experts": FieldSpec(
        "token", np.int16, False, "[layers, topk]: the experts that the engine chose; -1: not known", trailing=2
    ),
    "weight_versions": FieldSpec("response", np.int32, False, "weight version of each token; -1: not known"),
    "current": FieldSpec(
        "response", np.float32, False, "1 where the weights that train sampled the token, 0 where older did", True
    ),
    "temperatures": FieldSpec(
        "response", np.float32, False, "at which each token was sampled, where it is not --rollout-temperature", True
    ),
    "rewards": FieldSpec("sample", np.float32, True, "reward that is trained on, after post-processing"),
    "raw_rewards": FieldSpec("sample", np.float32, True, "reward as the reward function gave it"),
    "sample_index": FieldSpec("sample", np.int64, True, "Sample.index"),
    "group_index": FieldSpec("sample", np.int64, True, "Sample.group_index"),
    "truncated": FieldSpec("sample", np.bool_, True, "whether the response hit its length limit"),
    "attempt_tokens": FieldSpec(
        "sample", np.float32, False, "sum of the loss masks of the attempt's samples, where one has several", True
    ),
    "position": FieldSpec("sample", np.int64, False, "where the sample stands in the rollout", True),
    "log_probs": FieldSpec("response", np.float32, False, "the trainers' log-probs before the first step", True),
    "ref_log_probs": FieldSpec("response", np.float32, False, "the reference model's log-probs", True),
    "values": FieldSpec("response", np.float32, False, "the critic's value before each response token", True),
    "process_rewards": FieldSpec("response", np.float32, False, "PRIME's implicit reward of each token", True),
    "outcomes": FieldSpec("response", np.float32, False, "1 where the sample's raw reward is above 0 (PRIME)", True),
    "advantages": FieldSpec("response", np.float32, False, "advantage of each response token", True),
    "selected": FieldSpec("response", np.float32, False, "1 where a loss that chooses tokens chose this one", True),
    "returns": FieldSpec("response", np.float32, False, "what the critic's value is trained towards", True),
}


@dataclass
class TrainStep:
    """One optimizer step of one rank: its micro-batches, and the counts of the whole step over all ranks."""

    micro_batches: list[list[int]]  # indices into the shard's samples
    num_tokens: int  # response tokens with loss_mask, over all ranks
    num_samples: (
        int  # attempts of the step over all ranks, those without such a token included: removed, masked, failed
    )


@dataclass
class TrainShard:
    """One data-parallel rank's part of a rollout.

    total_lengths     [num_samples] int32, prompt and response
    response_lengths  [num_samples] int32
    fields            name of `FIELDS` → flat array of its extent
    metadata          one dict a sample, untouched from Sample.train_metadata / Sample.metadata
    extra             a user's columns (--custom-convert-samples-to-train-data-path): one value a sample
    spans             of each sample its images, in order; [] where no sample has one
    images            key → [h, w, 3] uint8, each image once
    adapter           that learns from the samples, all of which name it; None: the run has one, or none
    """

    rollout_id: int
    total_lengths: np.ndarray
    response_lengths: np.ndarray
    fields: dict[str, np.ndarray]
    steps: list[TrainStep]
    metadata: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    spans: list[list[ShardSpan]] = field(default_factory=list)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    adapter: str | None = None

    @property
    def num_samples(self) -> int:
        return len(self.total_lengths)

    def __post_init__(self) -> None:
        sizes = {
            "token": int(self.total_lengths.sum()),
            "response": int(self.response_lengths.sum()),
            "sample": len(self.total_lengths),
        }
        for name, spec in FIELDS.items():
            if name not in self.fields:
                assert not spec.required, f"train shard lacks the field {name!r}"
                continue
            array = self.fields[name]
            assert array.ndim == 1 + spec.trailing and len(array) == sizes[spec.extent], (
                f"train shard field {name!r}: shape {array.shape}, expected {sizes[spec.extent]} values"
            )
        if self.spans or self.images:
            self._check_images()

    def _check_images(self) -> None:
        """Check that each image is there once, and that its span lies in its sample and holds one placeholder."""
        assert len(self.spans) == self.num_samples, f"spans of {len(self.spans)} samples, of {self.num_samples}"
        needed = {key for spans in self.spans for _, key, _ in spans}
        assert needed == self.images.keys(), f"images of spans and of the shard differ: {needed ^ self.images.keys()}"
        placeholders = set()
        for tokens, spans in zip(self.split("tokens"), self.spans, strict=True):
            for first, key, (_, rows, columns) in spans:
                height, width, _ = self.images[key].shape
                patch = height // rows
                assert (rows * patch, columns * patch) == (height, width), f"image {key}: {rows} x {columns} patches"
                placeholders.add(int(tokens[first]))
        assert len(placeholders) < 2, f"spans begin with different tokens: {placeholders}"

    def split(self, name: str) -> list[np.ndarray]:
        """The field `name` as one array a sample (views)."""
        extent = FIELDS[name].extent
        if extent == "sample":
            return list(self.fields[name].reshape(-1, 1))
        lengths = self.total_lengths if extent == "token" else self.response_lengths
        return np.split(self.fields[name], np.cumsum(lengths)[:-1])


def joined(shards: Sequence[TrainShard]) -> TrainShard:
    """Return the shards of several data-parallel ranks as one, for a rank that takes their place: in each optimizer
    step it has all of their micro-batches."""
    if len(shards) == 1:
        return shards[0]
    firsts = np.cumsum([0, *(shard.num_samples for shard in shards[:-1])])
    steps = []
    for parts in zip(*(shard.steps for shard in shards), strict=True):
        placed = zip(firsts.tolist(), parts, strict=True)
        batches = [[first + i for i in batch] for first, part in placed for batch in part.micro_batches]
        steps.append(replace(parts[0], micro_batches=batches))
    names = [name for name in FIELDS if name in shards[0].fields]
    any_spans = any(shard.spans for shard in shards)
    return replace(
        shards[0],
        total_lengths=np.concatenate([shard.total_lengths for shard in shards]),
        response_lengths=np.concatenate([shard.response_lengths for shard in shards]),
        fields={name: np.concatenate([shard.fields[name] for shard in shards]) for name in names},
        steps=steps,
        metadata=[row for shard in shards for row in shard.metadata],
        extra={name: [value for shard in shards for value in shard.extra[name]] for name in shards[0].extra},
        spans=[row for shard in shards for row in shard.spans or [[]] * shard.num_samples] if any_spans else [],
        images={key: image for shard in shards for key, image in shard.images.items()},
    )


def flat_field(name: str, values: Sequence[object]) -> np.ndarray:
    """Join per-sample values of the field `name` into its flat array.

    Raises ValueError: a value that cannot be cast to the field's type.
    """
    spec = FIELDS[name]
    try:
        if spec.extent == "sample":
            return np.asarray(values, dtype=spec.dtype)
        if not values:
            return np.zeros(0, dtype=spec.dtype)
        parts: list[np.ndarray] = [np.asarray(value, dtype=spec.dtype) for value in values]
        return np.concatenate(parts if spec.trailing else [part.reshape(-1) for part in parts])
    except (TypeError, ValueError) as error:
        raise ValueError(f"train batch field {name!r}: {error}") from error


def join_attempt(samples: Sequence[Sample], number: int | None) -> None:
    """Mark several samples as one attempt, unless their function has done so.

    number  of the attempt in its group; None: the prompt has no index, and any number that no other attempt has
    """
    if len(samples) > 1:
        number = -1 - id(samples[0]) if number is None else number
        for sample in samples:
            if sample.rollout_id is None:
                sample.rollout_id = number


def attempts_of(samples: Sequence[Sample]) -> np.ndarray:
    """[n] the attempt of each sample, numbered from 0 on in the order of their first samples."""
    numbers: dict[tuple[object, ...], int] = {}
    keys = ((s.group_index, s.rollout_id) if s.rollout_id is not None else (i,) for i, s in enumerate(samples))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def attempt_shares(attempts: np.ndarray) -> np.ndarray:
    """[n] 1 / (samples of the sample's attempt): weights under which every attempt counts once."""
    return 1.0 / np.bincount(attempts)[attempts] if len(attempts) else np.zeros(0)
