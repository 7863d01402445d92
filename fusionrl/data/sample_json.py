"""Samples in a checkpoint: JSON that gives back each value with its type, and arrays bit by bit.

`Sample.to_dict` is for people and other programs: its numbers are plain lists. Here

    array              {"$array": [dtype, shape, base64]}
    scalar, tensor     {"$scalar": array} (numpy's), {"$tensor": array} (torch's)
    tuple, set         {"$tuple": […]}, {"$set": […]}
    bytes              {"$bytes": base64}
    dict               as it is, or {"$dict": [[key, value], …]} where a key is not a string or begins with "$"

and an object of another kind, which a hook may have put there, is stored as `to_jsonable` has it.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypedDict

import numpy as np

from fusionrl.data.sample import COUNTS, Sample, Status, stored_fields
from fusionrl.observe.json_values import to_jsonable


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
    torch = sys.modules.get("torch")  # where there is a tensor, torch has been imported
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:
        return {"$tensor": pack(value.detach().cpu().numpy())}
    return to_jsonable(value)


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
    if kind == "$bytes":
        return base64.b64decode(held)
    if kind == "$tensor":
        import torch

        return torch.from_numpy(np.array(unpack(held)))
    if kind == "$scalar":
        return unpack(held)[()]
    dtype, shape, data = held
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
