"""SGLang's layers with our kernels against the same layers without."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fusionrl.base import cpu_wing
from fusionrl.cpu import kernels, sglang_layers

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[None]:
    """SGLang's layers with the kernels; the tests of other files get those that they had."""
    cpu_wing.install_stand_ins()
    usual = [layer.forward_native for layer in _layers()]  # type: ignore[attr-defined]
    sglang_layers.register_layers()
    yield
    for layer, before in zip(_layers(), usual, strict=True):
        layer.forward_native = before  # type: ignore[attr-defined]


def _layers() -> tuple[type, type, type]:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return RMSNorm, SiluAndMul, RotaryEmbedding


@pytest.fixture
def num_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel was called."""
    counts = dict.fromkeys(("rms_norm", "add_rms_norm", "swiglu", "rotate_both"), 0)

    def counted(name: str, kernel: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return kernel(*args, **kwargs)

        return call

    for name in counts:
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    return counts


def _both(layer: Callable[..., object], *inputs: Tensor, **more: object) -> None:
    """The layer's outputs with the kernels and without are equal; SGLang rounds bf16 up to three times on the way."""
    ours = layer(*inputs, **more)
    bound = 2e-6 if inputs[-1].dtype is not torch.bfloat16 else 3 * 2**-8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "fit", lambda *tensors: False)
        torch.testing.assert_close(ours, layer(*inputs, **more), rtol=bound, atol=bound)


def _norm(size: int, **kwargs: object) -> torch.nn.Module:
    norm = _layers()[0](size, **kwargs)
    torch.nn.init.normal_(norm.weight)
    return norm.requires_grad_(False)


@TYPES
def test_norms(num_calls: dict[str, int], dtype: torch.dtype) -> None:
    norm, hidden, residual = _norm(32).to(dtype), torch.randn(9, 32, dtype=dtype), torch.randn(9, 32, dtype=dtype)
    _both(norm, hidden)
    _both(norm, torch.randn(9, 3, 64, dtype=dtype)[..., :32])
    assert num_calls["rms_norm"] == 2 and sum(num_calls.values()) == 2
    _both(norm, hidden, residual)
    assert num_calls["add_rms_norm"] == 1
    before = hidden.clone(), residual.clone()
    norm(hidden, residual)
    assert torch.equal(hidden, before[0]) and torch.equal(residual, before[1]), "neither is written over"


def test_other_norms_are_left_to_sglang(num_calls: dict[str, int]) -> None:
    hidden = torch.randn(9, 32)
    _both(_norm(32), hidden, torch.randn(9, 32), torch.randn(9, 32))  # a third summand
    _both(_norm(32, var_hidden_size=16), hidden)
    _both(_norm(32), hidden.bfloat16())  # a weight of another type
    _both(_norm(32, override_orig_dtype=torch.bfloat16), hidden)
    _both(_norm(32, override_orig_dtype=torch.float32).bfloat16(), hidden.bfloat16())
    _both(_norm(32, cast_x_before_out_mul=True).bfloat16(), hidden.bfloat16())
    _both(_norm(32, fp32_residual=True).bfloat16(), hidden.bfloat16(), hidden.bfloat16())
    _both(_norm(32), hidden, torch.randn(1, 32))  # a residual that is the same for all
    _both(_norm(32), hidden.clone().requires_grad_())  # whoever wants gradients
    assert set(num_calls.values()) == {0}
    with pytest.raises(ValueError, match="hidden_size"):
        _norm(32)(torch.randn(9, 31))


def test_gates(num_calls: dict[str, int]) -> None:
    gate = _layers()[1]()
    _both(gate, torch.randn(9, 32))
    _both(gate, torch.randn(9, 32, dtype=torch.bfloat16))
    assert num_calls["swiglu"] == 2
    _both(gate, torch.randn(9, 32, dtype=torch.float64))
    assert num_calls["swiglu"] == 2


@pytest.mark.parametrize(
    ("rotary_dim", "is_neox", "dtype", "num_kernels"),
    [
        *((16, True, torch.float32, 1), (8, True, torch.float32, 1), (16, True, torch.bfloat16, 1)),
        *((16, False, torch.float32, 0), (16, True, torch.float64, 0)),
    ],
)
def test_rotary_embeddings(
    num_calls: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    rotary_dim: int,
    is_neox: bool,
    dtype: torch.dtype,
    num_kernels: int,
) -> None:
    """Queries and keys are parts of a wider tensor."""
    from sglang.srt.layers.rotary_embedding import base

    monkeypatch.setattr(base, "_is_cpu", True)  # as in an engine's process, which has a variable for it
    rope = _layers()[2](16, rotary_dim, 64, 10000, is_neox, dtype)
    both = torch.randn(7, 6 * 16 + 5, dtype=dtype)
    query, key = both[:, : 4 * 16], both[:, 4 * 16 : 6 * 16]
    positions = torch.tensor([0, 3, 63, 1, 1, 2, 40])
    _both(rope, positions, query, key)
    assert num_calls["rotate_both"] == num_kernels
    _both(rope, torch.arange(14)[::2], query, key)
    _both(rope, positions, torch.randn(4 * 16, 7, dtype=dtype).t(), key)
    assert num_calls["rotate_both"] == 3 * num_kernels
    num_kernels *= 3
    if num_kernels:
        _both(rope, positions, query, key, torch.zeros(7, dtype=torch.long))  # SGLang's: offsets
        assert num_calls["rotate_both"] == num_kernels
        with pytest.raises(IndexError):
            rope(torch.tensor([0, 64, 0, 0, 0, 0, 0]), query, key)
