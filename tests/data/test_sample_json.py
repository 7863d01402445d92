"""Samples in a checkpoint come back as they were: types, arrays bit by bit, and what hooks added."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fusionrl.data.sample import Sample, Status
from fusionrl.data.sample_json import pack, pack_sample, unpack, unpack_sample


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b if isinstance(a, set) else repr(a) == repr(b)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


any_array = arrays.arrays(
    dtype=st.sampled_from([np.dtype(t) for t in ("f4", "f8", "f2", "i1", "i4", "i8", "u1", "?", ">f4")]),
    shape=arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
any_scalar = any_array.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
leaves = any_scalar | st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | any_array
keys = st.text() | st.sampled_from(["$array", "$dict", "$"]) | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(st.integers() | st.text(), max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def samples(draw: Any) -> Sample:
    """Any stage of a sample: none, part or all of a response; as arrays, or as a hook's plain lists."""
    num_prompt, length = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    sample = Sample(
        group_index=draw(st.none() | st.integers(-3, 9)),
        index=draw(st.none() | st.integers(0, 99)),
        prompt=draw(st.text() | st.just([{"role": "user", "content": "x"}])),
        tokens=draw(arrays.arrays(np.int32, num_prompt + length)),
        response=draw(st.text()),
        response_length=length,
        reward=draw(st.none() | st.floats() | st.dictionaries(st.text(), st.floats(), max_size=2)),
        loss_mask=draw(st.none() | arrays.arrays(np.int32, length)),
        rollout_log_probs=draw(st.none() | arrays.arrays(np.float32, length)),
        weight_versions=draw(st.none() | arrays.arrays(np.int32, length)),
        status=draw(st.sampled_from(list(Status))),
        metadata=draw(st.dictionaries(st.text(), values, max_size=2)),
        prompt_tokens=draw(st.none() | arrays.arrays(np.int32, num_prompt)),
    )
    if draw(st.booleans()):
        sample.tokens = list(map(int, sample.tokens))
        sample.rollout_log_probs = draw(st.lists(st.floats(), min_size=length, max_size=length))
    sample.added_by_a_hook = draw(values)  # type: ignore[attr-defined]
    return sample


@settings(deadline=None, max_examples=30)
@given(samples())
def test_a_sample_comes_back_bit_by_bit(sample: Sample) -> None:
    packed = pack_sample(sample)
    found = unpack_sample(through_json(packed))
    assert type(found) is Sample
    assert set(vars(found)) == set(vars(sample))
    for name, value in vars(sample).items():
        assert same(vars(found)[name], value), name
    assert json.dumps(pack_sample(found)) == json.dumps(packed), "the hash of a checkpoint's data cursor rests on it"


def test_float32_of_all_kinds() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 2_000, dtype=np.uint32)  # NaNs with payloads, subnormals, …
    log_probs = np.concatenate([bits, np.array([0, 1 << 31, 0x7F800000, 0xFF800000], np.uint32)]).view(np.float32)
    found = unpack_sample(through_json(pack_sample(Sample(rollout_log_probs=log_probs)))).array("rollout_log_probs")
    assert isinstance(found, np.ndarray) and found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), log_probs.view(np.uint32))
    found[0] = 1.0  # what was restored can be written on, as the original


def test_tensors_and_objects_of_other_kinds() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    found = unpack(through_json(pack({"routed": tensor})))["routed"]
    assert found.dtype == torch.int16 and torch.equal(found, tensor)
    half = torch.tensor([1.5], dtype=torch.bfloat16)
    assert unpack(through_json(pack([half, Status.ABORTED]))) == [[1.5], "aborted"]
    assert "object" in through_json(pack(object())), "kept as text: a checkpoint does not fail over it"
