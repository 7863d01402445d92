"""Samples from the return value of a user's conversion function (slime's dict of lists)."""

import math
from collections.abc import Sequence
from typing import Any

from fusionrl.data.sample import Sample, Status, is_trained_on

REQUIRED = ("tokens", "response_lengths", "rewards")
# Columns that become fields of the samples as they stand.
_FIELDS = {
    "tokens": "tokens",
    "response_lengths": "response_length",
    "loss_masks": "loss_mask",
    **{name: name for name in ("rollout_log_probs", "teacher_log_probs", "weight_versions", "rollout_routed_experts")},
    "metadata": "metadata",
}
_KNOWN = {*REQUIRED, *_FIELDS, "raw_reward", "truncated", "sample_indices", "group_index", "total_lengths"}


def samples_of(
    data: object, originals: Sequence[Sample], flag: str
) -> tuple[list[Sample], list[float], list[float], dict[str, list[object]]]:
    """Samples, rewards, raw rewards and a user's own columns, of `data`: name -> list with one entry a sample.

    tokens, response_lengths and rewards must be there; raw_reward, loss_masks, rollout_log_probs, teacher_log_probs,
    weight_versions, rollout_routed_experts, truncated, sample_indices, group_index and metadata may be. A sample whose
    index is that of one of `originals` belongs to its group, and is not trained on if the original is not.

    Raises:
        ValueError: names `flag` and what is missing or of another length.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{flag}: it returned {type(data).__name__}; expected a dict of lists")
    missing = [name for name in REQUIRED if name not in data]
    if missing:
        raise ValueError(f"{flag}: its dict lacks {', '.join(map(repr, missing))}; it has {sorted(data)}")
    count = len(data["tokens"])
    for name, values in data.items():
        if not hasattr(values, "__len__") or len(values) != count:
            size = len(values) if hasattr(values, "__len__") else "no"
            raise ValueError(f"{flag}: {name!r} has {size} entries, 'tokens' has {count}")
    known = {s.index: s for s in originals}
    samples = []
    for i in range(count):
        index = int(data["sample_indices"][i]) if "sample_indices" in data else i
        original = known.get(index) if "sample_indices" in data else None
        own_group = -2 - i if original is None else original.group_index
        fields: dict[str, Any] = {field: data[name][i] for name, field in _FIELDS.items() if name in data}
        fields["response_length"] = int(fields["response_length"])
        sample = Sample(
            index=index,
            group_index=int(data["group_index"][i]) if "group_index" in data else own_group,
            remove_sample=original is not None and not is_trained_on(original),
            image_spans=() if original is None else original.image_spans,
            status=Status.TRUNCATED if "truncated" in data and data["truncated"][i] else Status.COMPLETED,
            **fields,
        )
        try:
            sample.validate()
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from error
        samples.append(sample)
    rewards = [float(value) for value in data["rewards"]]
    raw = [float(value) for value in data["raw_reward"]] if "raw_reward" in data else rewards
    check_rewards(raw, rewards, flag)
    return samples, rewards, raw, {name: list(data[name]) for name in data if name not in _KNOWN}


def check_rewards(raw: Sequence[float], rewards: Sequence[float], flag: str) -> None:
    """Refuse rewards of a user's function from which no advantage can be computed.

    Raises:
        ValueError: one is not finite; names `flag` and where it stands.
    """
    for name, values in (("raw_reward", raw), ("rewards", rewards)):
        for i, value in enumerate(values):
            if not math.isfinite(value):
                raise ValueError(f"{flag}: {name}[{i}] is {value}; a reward must be a finite number")
