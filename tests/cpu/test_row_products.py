"""Products of a few rows are computed as products of more, where a row's bits would depend on their number."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusionrl.cpu import row_products


def _products(rows: Tensor, weight: Tensor) -> Tensor:
    """Without MKL, which this process may use in another mode than engines do."""
    return (rows[..., None, :] * weight).sum(-1)


def test_a_product_of_few_rows_is_one_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for AMD's: its results depend on the number of rows below four."""

    def by_rows(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = _products(rows, weight) + (0 if bias is None else bias)
        return out if rows.dim() != 2 or len(rows) >= 4 or rows.dtype is not torch.float32 else out + 1

    usual = row_products._matmul  # an earlier test of this process may have replaced torch.matmul
    monkeypatch.setattr(row_products, "_linear", by_rows)
    monkeypatch.setattr(row_products, "_matmul", lambda a, b, **_: usual(a, b) + (len(a) < 4))
    for module, name, value in ((functional, "linear", by_rows), (torch, "matmul", usual)):
        monkeypatch.setattr(module, name, value)
    row_products.least_rows.cache_clear()
    assert row_products.least_rows() == 4
    row_products.register()
    rows, weight, bias = torch.ones(6, 8), torch.ones(3, 8), torch.full((3,), 0.5)
    for count in (1, 2, 3, 4, 6):
        assert torch.equal(functional.linear(rows[:count], weight, bias), torch.full((count, 3), 8.5))
        assert torch.equal(torch.matmul(rows[:count], weight.T), torch.full((count, 3), 8.0))
    assert functional.linear(rows[:0], weight).shape == (0, 3)
    assert torch.equal(functional.linear(rows[0], weight), torch.full((3,), 8.0)), "a vector is left alone"
    assert functional.linear(rows[:1].bfloat16(), weight.bfloat16()).dtype is torch.bfloat16


def test_products_that_depend_on_any_number_of_rows_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def by_rows(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _products(rows, weight) + len(rows)

    monkeypatch.setattr(row_products, "_linear", by_rows)
    monkeypatch.setattr(functional, "linear", by_rows)
    row_products.least_rows.cache_clear()
    row_products.register()
    assert row_products.least_rows() is None and functional.linear is by_rows
    assert "depend on the batch" in caplog.text
    row_products.least_rows.cache_clear()
