"""The gated delta rule of packed sequences, against one token after the other in float64."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusionrl.cpu import megatron_patches

megatron_patches.install()

from fusionrl.trainer.gated_delta import Chunks, by_kernels, convolve, delta_rule  # noqa: E402

HEADS, KEY, VALUE = 3, 6, 5
LENGTHS = [(1,), (63,), (64,), (65,), (1, 130, 64, 7, 65)]


def inputs(count: int) -> list[Tensor]:
    """Query and key of length 1, value, the logarithm of the decay and beta of `count` tokens; some forget at once."""
    random = torch.Generator().manual_seed(count)
    query, key = (F.normalize(torch.randn(count, HEADS, KEY, generator=random), dim=-1) for _ in range(2))
    value = torch.randn(count, HEADS, VALUE, generator=random)
    decay = -torch.rand(count, HEADS, generator=random) * torch.tensor([0.01, 0.5, 8.0])
    beta = torch.rand(count, HEADS, generator=random)
    return [x.requires_grad_() for x in (query, key, value, decay, beta)]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """arXiv:2412.06464, equation 10, of one sequence."""
    state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    outs = []
    for q, k, v, g, b in zip(*(x.double() for x in (query, key, value, decay, beta)), strict=True):
        state = state * g.exp()[:, None, None]
        seen = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - seen))
        outs.append(torch.einsum("hk,hkv->hv", q, state) * KEY**-0.5)
    return torch.stack(outs)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_values_and_gradients_of_packed_sequences(lengths: tuple[int, ...]) -> None:
    tensors = inputs(sum(lengths))
    out = delta_rule(*tensors, Chunks.of(lengths, torch.device("cpu")))
    exact = torch.cat([one_by_one(*parts) for parts in zip(*(x.split(lengths) for x in tensors), strict=True)])
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=0)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((out * weights).sum(), tensors)
    wanted = torch.autograd.grad((exact * weights).sum(), tensors)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_a_sequence_gives_none_of_another_a_gradient() -> None:
    """Neither by its state nor by the convolution, not even by rounding."""
    lengths = (70, 3, 128)
    tensors, chunks = inputs(sum(lengths)), Chunks.of(lengths, torch.device("cpu"))
    kernel = torch.randn(HEADS * VALUE, 4)
    rows = convolve(tensors[2].flatten(1), kernel, chunks).view_as(tensors[2])
    out = delta_rule(*tensors[:2], rows, *tensors[3:], chunks)
    start = 0
    for length, part in zip(lengths, out.split(lengths), strict=True):
        for grad in torch.autograd.grad(part.square().sum(), tensors, retain_graph=True):
            inside = grad[start : start + length]
            assert inside.any() and grad.count_nonzero() == inside.count_nonzero()
        start += length


def test_the_convolution_begins_anew_with_each_sequence() -> None:
    lengths = (1, 2, 0, 9)
    rows, kernel = torch.randn(sum(lengths), 6), torch.randn(6, 4)
    found = convolve(rows, kernel, Chunks.of(lengths, torch.device("cpu")))
    parts = filter(len, rows.split(lengths))
    alone = [F.conv1d(F.pad(part.T[None], (3, 0)), kernel[:, None], groups=6)[0].T for part in parts]
    torch.testing.assert_close(found, F.silu(torch.cat(alone)))


def test_the_kernels_are_given_the_same_offsets_in_all_layers_and_no_empty_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, module = [], ModuleType("fla.ops.gated_delta_rule")

    def rule(*tensors: Tensor, cu_seqlens: Tensor, **unused: Tensor) -> tuple[Tensor, None]:
        given.append(cu_seqlens)
        return tensors[2], None

    module.chunk_gated_delta_rule = rule  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tensors = inputs(8)
    assert all(torch.equal(by_kernels(*tensors, (3, 0, 5)), tensors[2]) for _ in range(2))
    assert given[0].tolist() == [0, 3, 8] and given[0].dtype is torch.int32 and given[1] is given[0]
