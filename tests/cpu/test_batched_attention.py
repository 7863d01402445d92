"""Attention of whole batches against attention computed request by request in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fusionrl.cpu import batched_attention
from fusionrl.cpu.batched_attention import AttentionPlan, attend, divide, plan_attention

NUM_SLOTS = 2048


@dataclass(frozen=True)
class Case:
    """Requests (tokens in the cache, tokens to compute), and heads."""

    requests: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    window: int | None = None
    dtype: torch.dtype = torch.float32
    num_calls: int | None = None


CASES = {
    "decode of equal lengths": Case([(9, 1)] * 5, num_calls=1),
    "decode of different lengths": Case([(0, 1), (17, 1), (3, 1), (40, 1)], num_calls=1),
    "decode of very different lengths": Case([(2, 1)] * 20 + [(1700, 1), (3, 1)] * 3, num_calls=2),
    "one head": Case([(6, 1), (2, 1)], heads=(1, 1)),
    "as many keys as heads": Case([(6, 1), (2, 5)], heads=(3, 3)),
    "nine heads, three of keys": Case([(30, 1), (31, 1), (29, 1)], heads=(9, 3), sizes=(64, 64)),
    "values of another size": Case([(6, 1), (9, 1), (0, 4)], sizes=(16, 8)),
    "prompts of one length": Case([(0, 7)] * 4, num_calls=1),
    "prompts of different lengths": Case([(0, 7), (0, 1), (0, 12)], num_calls=1),
    "long and short prompts": Case([(0, 250), (0, 4), (0, 5), (0, 240), (0, 3)], num_calls=2),
    "cached prefixes": Case([(5, 7), (0, 3), (64, 2), (1, 1)]),
    "a long prefix and new prompts": Case([(900, 30), (0, 3), (0, 5), (880, 25)], num_calls=2),
    "window, decode": Case([(3, 1), (50, 1), (20, 1)], window=8),
    "window, prompts": Case([(0, 30), (0, 4), (40, 10)], window=8),
    "window of one token more than the prompt": Case([(0, 9), (0, 8)], window=9),
    "window of none but itself": Case([(0, 9), (5, 1)], window=0),
    "bf16, decode": Case([(9, 1), (30, 1)], heads=(9, 3), dtype=torch.bfloat16),
    "bf16, prompts": Case([(9, 5), (0, 6)], heads=(9, 3), dtype=torch.bfloat16),
}


def _table(case: Case, generator: torch.Generator) -> Tensor:
    """Slot of each token of each request, in rows of their own; what no request has is a stranger's."""
    longest = max(sum(request) for request in case.requests)
    count = len(case.requests)
    pick = torch.randperm(NUM_SLOTS, generator=generator)
    table = torch.full((count, longest), NUM_SLOTS)
    start = 0
    for row, (prefix, new) in enumerate(case.requests):
        own = [pick[(start + i) % NUM_SLOTS] for i in range(prefix + new)]
        table[row, : prefix + new] = torch.stack(own)
        start += prefix + new
    return table.int()


def _one_by_one(case: Case, table: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The same by the formula, a token at a time, in float64."""
    out, done = [], 0
    repeat = case.heads[0] // case.heads[1]
    for row, (prefix, new) in enumerate(case.requests):
        for position in range(prefix, prefix + new):
            first = 0 if case.window is None else max(0, position - case.window)
            slots = table[row, first : position + 1].long()
            key = keys[slots].double().repeat_interleave(repeat, 1)
            value = values[slots].double().repeat_interleave(repeat, 1)
            scores = torch.einsum("hd,lhd->hl", query[done].double(), key) * scale
            out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), value))
            done += 1
    return torch.stack(out)


def _plan(case: Case, table: Tensor) -> AttentionPlan:
    """Rows of the table in another order than the requests', as SGLang reuses them."""
    rows = torch.arange(len(case.requests)).flip(0)
    prefixes, news = ([request[i] for request in case.requests] for i in (0, 1))
    row_bytes = case.heads[1] * max(case.sizes) * case.dtype.itemsize
    return plan_attention(
        table.flip(0), rows, prefixes, news, dtype=case.dtype, row_bytes=row_bytes, window=case.window
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_formula(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _check(case)
    if case.num_calls is not None:
        assert len(plan.groups) == case.num_calls
    # Bounds so small that the case is in many groups, and every request of several tokens on a prefix in pieces.
    monkeypatch.setattr(batched_attention, "_GROUP_BYTES", 6000)
    monkeypatch.setattr(batched_attention, "_MASK_SCORES", 50)
    _check(case)


def _check(case: Case) -> AttentionPlan:
    generator = torch.Generator().manual_seed(3)
    heads, groups = case.heads
    table = _table(case, generator)
    keys = torch.randn(NUM_SLOTS + 1, groups, case.sizes[0], generator=generator).to(case.dtype)
    values = torch.randn(NUM_SLOTS + 1, groups, case.sizes[1], generator=generator).to(case.dtype)
    keys[NUM_SLOTS] = values[NUM_SLOTS] = torch.nan  # a slot that nobody has
    num_tokens = sum(new for _, new in case.requests)
    query = torch.randn(num_tokens, heads, case.sizes[0], generator=generator).to(case.dtype)
    plan = _plan(case, table)
    out = attend(plan, query, keys, values, scale=0.3)
    expected = _one_by_one(case, table, query, keys, values, 0.3)
    tolerance = 2e-6 if case.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    return plan


def test_a_shared_prompt_is_copied_in_bounded_groups() -> None:
    """64 requests on one prompt of 2k tokens: their copies would be many times the cache."""
    length, row_bytes = 2048, 4096
    table = torch.cat([torch.arange(length).expand(64, -1), torch.arange(length, length + 64)[:, None]], 1).int()
    plan = plan_attention(table, torch.arange(64), [length] * 64, [1] * 64, dtype=torch.float32, row_bytes=row_bytes)
    assert sum(group.count for group in plan.groups) == 64
    assert max(group.count * group.num_keys * row_bytes for group in plan.groups) <= 32 * 2**20
    # What is small stays one call.
    plan = plan_attention(table, torch.arange(64), [100] * 64, [1] * 64, dtype=torch.float32, row_bytes=row_bytes)
    assert len(plan.groups) == 1


def test_a_long_part_of_a_long_prompt_has_bounded_masks() -> None:
    """8k tokens that follow on 16k: one mask would be 0.8 GB; and a few such requests at once."""
    for requests in ([(16384, 8192)], [(16384, 512)] * 16, [(8192, 128)] * 64):
        table = torch.arange(len(requests) * 24576).view(len(requests), -1).int()
        prefixes, news = ([request[i] for request in requests] for i in (0, 1))
        plan = plan_attention(table, torch.arange(len(requests)), prefixes, news, dtype=torch.float32, row_bytes=256)
        assert not any(isinstance(group.mask, torch.Tensor) for group in plan.groups), "each layer makes them"
        assert max(group.count * group.num_queries * group.num_keys for group in plan.groups) <= 16 * 2**20
        assert sum(group.count * group.num_queries for group in plan.groups) == sum(news)
    # A prompt of its own needs none, and stays whole.
    plan = plan_attention(table, torch.tensor([0]), [0], [8192], dtype=torch.float32, row_bytes=256)
    assert [(group.mask, group.is_causal) for group in plan.groups] == [(None, True)]


def test_one_group_keeps_the_order_and_many_take_little_padding() -> None:
    assert divide([3, 9, 4], [1, 1, 1]) == [[0, 1, 2]]
    lengths = [1700, 20, 30, 1600] * 16
    parts = divide(lengths, [1] * 64)
    assert sorted(i for part in parts for i in part) == list(range(64))
    assert len(parts) == 2
    rows = sum(len(part) * max(lengths[i] + 1 for i in part) for part in parts)
    assert rows < 1.15 * (sum(lengths) + len(lengths))
