"""Changes of tensors as bytes: out comes what went in, and damage is noticed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionrl.engines.disk_versions import DamagedDelta, Encoding, apply, checksum_of, encode

ENCODINGS: list[Encoding] = ["xor", "overwrite"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ENCODINGS),
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    st.integers(0, 3000),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_out_comes_what_went_in(encoding: Encoding, dtype: type, size: int, density: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    base, other = (random.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True) for _ in range(2))
    new = np.where(random.random(size) < density, other, base)
    payload, num_changed = encode(base, new, encoding)
    assert num_changed == sum(a != b for a, b in zip(base.tolist(), new.tolist(), strict=True))
    target = base.copy()
    apply(target, payload, encoding, num_changed)
    assert target.dtype == new.dtype
    assert target.tolist() == new.tolist()
    if encoding == "overwrite":
        apply(target, payload, encoding, num_changed)
        assert target.tolist() == new.tolist()


def test_steps_of_a_learning_rate_in_bf16() -> None:
    """A line of docs/guides/weight-push.md: normal weights, each moved by up to the learning rate."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2_000_000, generator=generator) * 0.02
    moves = (2 * torch.rand(weights.numel(), generator=generator) - 1) * 1e-5
    base, new = (x.bfloat16().view(torch.uint16).numpy() for x in (weights, weights + moves))
    for encoding, share in (("xor", 0.110), ("overwrite", 0.140)):
        payload, num_changed = encode(base, new, encoding)
        assert num_changed / base.size == pytest.approx(0.145, rel=0.03)
        assert len(payload) / base.nbytes == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_that_are_no_change_of_this_tensor_touch_nothing(encoding: Encoding) -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 2**16, 5000, np.uint16)
    new = base + (random.random(5000) < 0.1).astype(np.uint16)
    payload, count = encode(base, new, encoding)
    longer = encode(np.concatenate([base, base[:100]]), np.concatenate([new, ~base[:100]]), encoding)
    for wrong, number in [(payload[:-3], count), (b"nonsense", count), longer, (b"", count)]:
        target = base.copy()
        with pytest.raises(DamagedDelta):
            apply(target, wrong, encoding, number)
        assert target.tobytes() == base.tobytes()


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [  # the algorithms' published test vectors
        ("xxh3-128", b"", "99aa06d3014798d86001c324468d497f"),
        ("blake3", b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        ("sha256", b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        ("adler32", b"Wikipedia", "11e60398"),
    ],
)
def test_checksums(kind: str, data: bytes, expected: str) -> None:
    assert checksum_of(data, kind) == expected
    array = np.frombuffer(bytes(range(64)), np.uint16)
    assert checksum_of(array, kind) == checksum_of(array.tobytes(), kind)
