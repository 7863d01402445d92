"""Attention of a packed row by our own kernel, against the formula in float64 and against torch's attention."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fusionrl.cpu import kernels, row_functions

SCALE = 0.3
# (query heads, key heads, size of a key, size of a value): multiples of the width of a vector, and others
HEADS = [(4, 2, 32, 32), (9, 3, 64, 64), (2, 1, 128, 128), (3, 3, 20, 12), (6, 2, 7, 33)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)
    assert kernels.loaded(), "this machine has a C compiler"


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _siblings(prompts: list[int], responses: list[int]) -> tuple[list[np.ndarray], int]:
    """(rows of responses of these lengths to prompts of those, the siblings of a prompt not side by side; tokens)."""
    heads, end = [], 0
    for prompt in prompts:
        heads.append(np.arange(end, end + prompt))
        end += prompt
    rows = []
    for response in responses:
        for head in heads:
            rows.append(np.concatenate([head, np.arange(end, end + response)]))
            end += response
    return rows, end


def _split(wide: Tensor, heads: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as parts of one tensor, as a projection leaves them."""
    count, groups, size, value_size = heads
    parts = wide.split([count * size, groups * size, groups * value_size], 1)
    return parts[0].view(-1, count, size), parts[1].view(-1, groups, size), parts[2].view(-1, groups, value_size)


def _exact(query: Tensor, key: Tensor, value: Tensor, rows: list[np.ndarray]) -> Tensor:
    """Each sequence by itself; of tokens that several have, the first one's."""
    out = torch.zeros(*query.shape[:2], value.size(2), dtype=query.dtype)
    known: set[int] = set()
    repeat = query.size(1) // key.size(1)
    for row in rows:
        q, k, v = query[row], key[row].repeat_interleave(repeat, 1), value[row].repeat_interleave(repeat, 1)
        scores = SCALE * torch.einsum("ihd,jhd->hij", q, k)
        scores = scores.masked_fill(torch.ones(len(row), len(row)).triu(1).bool(), -torch.inf)
        answers = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
        new = [i for i, token in enumerate(row.tolist()) if token not in known]
        known |= set(row.tolist())
        out = out.index_put((torch.from_numpy(row[new]),), answers[new])
    return out


def _both_ways(
    rows: list[np.ndarray], num_tokens: int, heads: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """(output and gradient of the kernel, the same in float64)."""
    table = row_functions.plan_rows(rows, num_tokens)
    assert table is not None
    count, groups, size, value_size = heads
    wide = torch.randn(num_tokens, count * size + groups * (size + value_size)).to(dtype).requires_grad_()
    double = wide.detach().double().requires_grad_()
    out, exact = row_functions.attend(*_split(wide, heads), table, SCALE), _exact(*_split(double, heads), rows)
    of_output = torch.randn_like(exact)
    of_output = of_output.to(dtype).double()
    (grad,) = torch.autograd.grad(out, wide, of_output.to(dtype))
    (expected,) = torch.autograd.grad(exact, double, of_output)
    return [out, grad], [exact, expected]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_outputs_and_gradients(threads: int, heads: tuple[int, int, int, int]) -> None:
    rows, num_tokens = _siblings([9, 1, 17], [31, 5, 16, 1, 0])
    for found, exact in zip(*_both_ways(rows, num_tokens + 3, heads, torch.float32), strict=True):
        assert found.dtype is torch.float32
        assert (found - exact).abs().max() < 2e-6 * exact.abs().max()
    rows = [np.arange(700), np.arange(700, 703)]
    for found, exact in zip(*_both_ways(rows, 703, heads, torch.float32), strict=True):
        assert (found - exact).abs().max() < 4e-6 * exact.abs().max()


def test_a_number_of_bf16_is_rounded_once() -> None:
    rows, num_tokens = _siblings([9, 3], [31, 5, 16])
    for found, exact in zip(*_both_ways(rows, num_tokens, (4, 2, 32, 32), torch.bfloat16), strict=True):
        assert found.dtype is torch.bfloat16
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2e-6 * exact.abs().max()).all()


def test_scores_of_any_size_are_no_overflow() -> None:
    table = row_functions.plan_rows([np.arange(40)], 40)
    assert table is not None
    for size, bound in ((300.0, 1e-2), (1e5, torch.inf)):  # scores of 1e6 are known to 0.1, those of 1e11 to 1e4
        query, key, value = size * torch.randn(40, 2, 32), size * torch.randn(40, 2, 32), torch.randn(40, 2, 32)
        out = row_functions.attend(query, key, value, table, SCALE)
        exact = _exact(query.double(), key.double(), value.double(), [np.arange(40)])
        assert (out - exact).abs().max() < bound and out.isfinite().all()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    rows, num_tokens = _siblings([9] * 6, [31, 7])
    found, before = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(3)
            found.append(_both_ways(rows, num_tokens, (4, 2, 32, 32), torch.float32)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_tokens_of_no_sequence_are_zero_and_get_no_gradient() -> None:
    rows = [np.arange(3, 9), np.arange(12, 20)]
    (out, grad), _ = _both_ways(rows, 24, (4, 2, 32, 32), torch.float32)
    outside = np.setdiff1d(np.arange(24), np.concatenate(rows))
    assert not out[outside].any() and not grad[outside].any() and grad[rows[0]].any()


def test_the_table_puts_siblings_side_by_side() -> None:
    rows, num_tokens = _siblings([2, 3], [4, 1])
    table = row_functions.plan_rows([*rows, np.zeros(0, np.int64)], num_tokens)
    assert table is not None and table.is_whole and table.longest == 7
    assert table.families.tolist() == [0, 2, 4]
    assert table.firsts.tolist() == [0, 2, 0, 3]
    assert table.starts.tolist() == [0, 6, 9, 16, 20]
    assert table.places[:9].tolist() == [*rows[0], *rows[2]]
    assert row_functions.plan_rows([np.zeros(0, np.int64)], 1) is None


@pytest.mark.parametrize("rows", [([0, 1, 2], [3, 1, 4]), ([0, 1], [1, 2]), ([0, 1, 2], [0, 2])], ids=str)
def test_sequences_that_share_tokens_elsewhere_are_a_mistake(rows: tuple[list[int], ...]) -> None:
    with pytest.raises(AssertionError, match="at their begin"):
        row_functions.plan_rows([np.array(row) for row in rows], 5)


def test_without_a_compiler_there_is_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "loaded", lambda: False)
    assert row_functions.plan_rows([np.arange(4)], 4) is None
