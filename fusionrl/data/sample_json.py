"""Samples in files and checkpoints, and the check that their values can be trained on.

In a checkpoint, JSON gives back each value with its type, and arrays bit by bit.

`Sample.to_dict` is for people and other programs: its numbers are plain lists. Here

    array              {"$array": [dtype, shape, base64]}
    scalar, tensor     {"$scalar": array} (numpy's), {"$tensor": array} (torch's)
    tuple, set         {"$tuple": […]}, {"$set": […]}
    bytes              {"$bytes": base64}
    image              {"$image": […]}, a reference; {"$view": reference} and {"$picture": base64 of PNG}, images of PIL
    dict               as it is, or {"$dict": [[key, value], …]} where a key is not a string or begins with "$"

and an object of another kind, which a hook may have put there, is stored as `to_jsonable` has it.
"""

import base64
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, ValidationError

from fusionrl.data.images import ImageRef, interned, picture, png_of
from fusionrl.data.sample import COUNTS, Sample, Status, is_trained_on, stored_fields
from fusionrl.data.sample_fields import LARGEST_LOG_PROB, SMALLEST_LOG_PROB
from fusionrl.observe.formats import to_jsonable


class SetState(TypedDict):
    """Place in one set of prompts."""

    name: str
    num_drawn: int
    num_prompts: int
    fingerprint: str
    share: str


class SourceState(TypedDict):
    """State of the data source: cursor, counters, metadata of hooks, groups that were handed back; all packed."""

    sets: list[SetState]
    num_groups: int
    num_samples: int
    metadata: object
    buffer: list[list[dict[str, object]]]


def pack_sample(sample: Sample) -> dict[str, object]:
    """Return all attributes of a sample, including those that hooks added, for JSON (NaN and infinities stay)."""
    values = stored_fields(sample) | {"status": Status(sample.status).value}
    values |= {name: values[name].to_dict() for name in COUNTS if name in values}
    return {name: pack(value) for name, value in values.items()}


def unpack_sample(data: Mapping[str, object]) -> Sample:
    """The inverse of `pack_sample`."""
    values = {name: unpack(value) for name, value in data.items()}
    values["status"] = Status(values["status"])
    values |= {name: kind.from_dict(values[name]) for name, kind in COUNTS.items() if name in values}
    field_names = {field.name for field in fields(Sample)}
    sample = Sample(**{name: value for name, value in values.items() if name in field_names})
    vars(sample).update(values)
    return sample


def pack(value: object) -> object:
    """`value` for JSON."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [pack(item) for item in value]
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {"$dict": [[pack(key), pack(item)] for key, item in value.items()]}
    if type(value) is tuple:
        return {"$tuple": [pack(item) for item in value]}
    if type(value) is set:
        return {"$set": [pack(item) for item in sorted(value, key=repr)]}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {"$scalar": pack(np.asarray(value))}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {"$array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, ImageRef):
        return {"$image": [value.key, value.height, value.width, value.num_tokens, value.source]}
    if "PIL.Image" in sys.modules and isinstance(value, sys.modules["PIL.Image"].Image):
        from fusionrl.data.processor import ref_of

        ref = ref_of(value)
        return {"$picture": base64.b64encode(png_of(value)).decode()} if ref is None else {"$view": pack(ref)}
    torch = sys.modules.get("torch")  # where there is a tensor, torch has been imported
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:
        return {"$tensor": pack(value.detach().cpu().numpy())}
    return to_jsonable(value)


def images_in(packed: object) -> Iterator[ImageRef]:
    """Yield the references in what `pack` made."""
    if isinstance(packed, list):
        for item in packed:
            yield from images_in(item)
    elif isinstance(packed, dict):
        if "$image" in packed:
            yield interned(*packed["$image"])
        else:
            for item in packed.values():
                yield from images_in(item)


def unpack(value: object) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: unpack(item) for key, item in value.items()}
    held = value[kind]
    if kind == "$dict":
        return {unpack(key): unpack(item) for key, item in held}
    if kind == "$tuple":
        return tuple(unpack(item) for item in held)
    if kind == "$set":
        return {unpack(item) for item in held}
    if kind == "$image":
        return interned(*held)
    if kind in ("$view", "$picture"):
        from fusionrl.data.processor import StoredImage

        return StoredImage(unpack(held)) if kind == "$view" else picture(base64.b64decode(held))
    if kind == "$bytes":
        return base64.b64decode(held)
    if kind == "$tensor":
        import torch

        return torch.from_numpy(np.array(unpack(held)))
    if kind == "$scalar":
        return unpack(held)[()]
    dtype, shape, data = held
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


# ------------------------------------------------------------------------------------------------ values
_LARGEST_VERSION = _LARGEST_TOKEN = int(np.iinfo(np.int32).max)


def check_values(sample: Sample, vocab_size: int | None = None, num_experts: int | None = None) -> None:
    """Check that every number of a sample that reaches the trainers is one that they can compute with.

    tokens are whole numbers in [0, vocab_size), log-probs finite and at most 0, masks between 0 and 1, weight versions
    whole numbers from -1 on, experts in [-1, num_experts). Lengths are `Sample.validate`'s, which this calls.

    Raises ValueError: names the sample, the field, the value and its place.
    """
    sample.validate()
    held = vars(sample)
    most = _LARGEST_TOKEN if vocab_size is None else vocab_size - 1
    if sample.num_tokens:
        _check(sample, "tokens", 0, most, "iu", "the model's tokens are 0..{most}")
    for name in ("rollout_log_probs", "teacher_log_probs"):
        if held[name] is not None:
            _check(sample, name, SMALLEST_LOG_PROB, LARGEST_LOG_PROB, "fiu", "log-probs are finite and at most 0")
    if held["loss_mask"] is not None:
        _check(sample, "loss_mask", 0, 1, "fiub", "1 is trained on, 0 is not")
    if held["weight_versions"] is not None:
        _check(sample, "weight_versions", -1, _LARGEST_VERSION, "iu", "versions are whole numbers from 0 on")
    if held["rollout_routed_experts"] is not None:
        most = np.iinfo(np.int16).max if num_experts is None else num_experts - 1
        _check(sample, "rollout_routed_experts", -1, most, "iu", "the model's experts are 0..{most}, -1 is unknown")


def _check(sample: Sample, name: str, least: float, most: float, kinds: str, rule: str) -> None:
    """Check a field that is not None.

    kinds  kinds of numpy dtype that the field may have
    rule   text for messages; {most} is filled in
    """
    stored = vars(sample)[name]
    rule = rule.replace("{most}", str(most))
    try:
        values = np.asarray(stored)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"sample {sample.index}: {name} is not an array of numbers ({error})") from error
    if not values.size:
        return
    if values.dtype.kind not in kinds:
        flat = stored.ravel().tolist() if isinstance(stored, np.ndarray) else list(stored)
        strange = next((each for each in flat if isinstance(each, bool) or not isinstance(each, int)), flat[0])
        raise ValueError(f"sample {sample.index}: {name} holds {strange!r:.80}; {rule}")
    if not (values.min() >= least and values.max() <= most):  # NaN is not within
        place = np.argwhere(~((values >= least) & (values <= most)))[0]
        value, where = values[tuple(place)], ", ".join(map(str, place))
        raise ValueError(f"sample {sample.index}: {name} holds {value:.6g} at place {where}; {rule}")


def read_samples(path: Path, vocab_size: int | None = None, num_experts: int | None = None) -> list[Sample]:
    """Saved samples, a JSON object each line (`Sample.to_dict`), each checked by `check_values`.

    Raises ValueError: names file, line and what is wrong.
    """
    samples = []
    with path.open("rb") as lines:  # not splitlines: a response may hold other ends of lines
        for number, line in enumerate(lines, 1):
            try:
                samples.append(_read_sample(line))
                check_values(samples[-1], vocab_size, num_experts)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not samples:
        raise ValueError(f"{path}: it holds no samples")
    return samples


def _read_sample(line: bytes) -> Sample:
    row = _read_json(line)
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not a JSON object with a sample's fields")
    try:
        _Row.model_validate(row)
        return Sample.from_dict(row)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]} is {first['input']!r:.80}: {first['msg']}") from error
    except (TypeError, OverflowError) as error:
        raise ValueError(f"its fields do not make a sample ({error})") from error


def _read_json(line: bytes) -> object:
    """Not by orjson: it rounds numbers of over 64 bits, and refuses half a surrogate pair, which a label may hold."""

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is no JSON number")

    try:
        return json.loads(line, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("not valid JSON (nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error


_Whole = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
_Reward = FiniteFloat | bool


class _Row(BaseModel, strict=True):
    """Fields of a saved sample as its line must have them: a cast to an array would round 1.5 to 1."""

    tokens: list[_Whole] | None = None
    prompt_tokens: list[_Whole] | None = None
    weight_versions: list[_Whole] | None = None
    loss_mask: list[float] | None = None
    rollout_log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None
    prompt: str | list[Any] = ""
    response: str = ""
    response_length: NonNegativeInt = 0
    metadata: dict[str, Any] = {}
    adapter: str | None = None
    # A dict may also hold texts and null: the reward `dapo` keeps the answer that it found.
    reward: _Reward | dict[str, _Reward | str | list[Any] | dict[str, Any] | None] | None = None
    baseline_reward: _Reward | None = None


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

    Raises ValueError: names `flag` and what is missing or of another number. `check_samples` checks the samples.
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
        samples.append(
            Sample(
                index=index,
                group_index=int(data["group_index"][i]) if "group_index" in data else own_group,
                remove_sample=original is not None and not is_trained_on(original),
                image_spans=() if original is None else original.image_spans,
                status=Status.TRUNCATED if "truncated" in data and data["truncated"][i] else Status.COMPLETED,
                **fields,
            )
        )
    rewards = [float(value) for value in data["rewards"]]
    raw = [float(value) for value in data["raw_reward"]] if "raw_reward" in data else rewards
    check_rewards(raw, rewards, flag)
    return samples, rewards, raw, {name: list(data[name]) for name in data if name not in _KNOWN}


def check_rewards(raw: Sequence[float], rewards: Sequence[float], flag: str) -> None:
    """Refuse rewards of a user's function from which no advantage can be computed.

    Raises ValueError: one is not finite; names `flag` and where it stands.
    """
    for name, values in (("raw_reward", raw), ("rewards", rewards)):
        for i, value in enumerate(values):
            if not math.isfinite(value):
                raise ValueError(f"{flag}: {name}[{i}] is {value}; a reward must be a finite number")
