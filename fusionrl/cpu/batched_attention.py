"""Attention of a whole batch over a paged KV cache, in a few calls of torch: a decode step, or many short prompts.

A request computes its newest tokens, which follow on those that the cache holds (its prefix). Requests of similar
lengths make a `Group`: their queries and keys are padded to one length and attended in one call. Memory is bounded: a
group copies so many bytes of keys at most, a request with many tokens on a long prefix is cut into pieces, and each
layer makes its masks.

Shapes: T new tokens of the batch, one request after the other; N slots of the cache; H heads of queries, K of keys and
values; D and V their sizes. Pure torch: nothing here knows SGLang.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_CALL_ROWS = 512  # rows of keys that are read in the time that one more call takes
_PADDED_SHARE = 0.125  # of a group's cost that may be padding, however much that is
_ROW_SCORES = 64  # scores that are computed in the time in which a row is read
# Keys that a group of several requests copies, and as many values: the process keeps freed blocks of this size
# (`engines/launch_server.py`).
_GROUP_BYTES = 32 * 2**20
_MASK_SCORES = 16 * 2**20  # of a mask


@dataclass(frozen=True)
class Seen:
    """The keys that the queries of a group see, in small; `mask` is large."""

    positions: Tensor  # [count, num_keys] of each key in its request
    queries: Tensor  # [count, num_queries] position of each query: it sees no later key
    window: int | None
    dtype: torch.dtype

    def mask(self) -> Tensor:
        """[count, 1, num_queries, num_keys] to add to the scores."""
        positions, queries = self.positions[:, None], self.queries[:, :, None]
        is_hidden = positions > queries
        if self.window is not None:
            is_hidden |= positions < queries - self.window
        return torch.zeros(is_hidden.shape, dtype=self.dtype).masked_fill_(is_hidden, -math.inf)[:, None]


@dataclass(frozen=True)
class Group:
    """Requests that are attended in one call: `count` of them, padded to `num_queries` and `num_keys`."""

    count: int
    num_queries: int
    num_keys: int
    tokens: Tensor | None  # [count * num_queries] new token of each query; None: these are all tokens, in order
    slots: Tensor  # [count * num_keys] of each key; padding repeats the request's last slot: no stranger's NaN comes in
    # [count, 1, num_queries, num_keys], added to the scores, or what each layer makes it of; None: all keys are seen
    mask: Tensor | Seen | None
    is_causal: bool  # query i sees the keys 0..i and no others


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of one forward pass."""

    groups: tuple[Group, ...]
    places: Tensor | None  # [T] of each token's output in those of the groups, one after the other; None: in order


def plan_attention(
    table: Tensor,
    rows: Tensor,
    prefixes: Sequence[int],
    news: Sequence[int],
    *,
    dtype: torch.dtype,
    row_bytes: int,
    window: int | None = None,
) -> AttentionPlan:
    """Plan the calls for requests with `prefixes` tokens in the cache and `news` tokens, one or more, to compute.

    `table` [any, longest] has the slot of each token of each request, in row `rows` [requests]; `dtype` is
    that of the queries, `row_bytes` that of a token's keys, or of its values. A query sees `window` tokens before its
    own; None: all of them.
    """
    if max(news) > 1:
        rows, prefixes, news = _cut(rows, prefixes, news, window)
    before = prefixes if window is None else [min(prefix, window) for prefix in prefixes]
    parts = divide(before, news, _GROUP_BYTES // row_bytes, window is not None or max(prefixes) > 0)
    starts = torch.tensor([0, *news]).cumsum(0)
    groups = [_group(table, rows, prefixes, news, part, starts, dtype, window) for part in parts]
    if len(groups) == 1 and groups[0].tokens is None:
        return AttentionPlan(tuple(groups), None)
    places, filled = torch.empty(int(starts[-1]), dtype=torch.long), 0
    for part, group in zip(parts, groups, strict=True):
        offsets = torch.arange(group.num_queries)
        is_real = offsets < torch.tensor([news[i] for i in part])[:, None]
        tokens = starts[torch.tensor(part), None] + offsets
        cells = torch.arange(filled, filled + group.count * group.num_queries).view(group.count, -1)
        places[tokens[is_real]] = cells[is_real]
        filled += group.count * group.num_queries
    return AttentionPlan(tuple(groups), places)


def _cut(
    rows: Tensor, prefixes: Sequence[int], news: Sequence[int], window: int | None
) -> tuple[Tensor, Sequence[int], Sequence[int]]:
    """(rows, prefixes, news), with a request whose mask would be too large in pieces.

    The cache holds the new tokens before anyone attends to them, so a piece may be a request whose prefix is the
    pieces before it.
    """
    lengths = []
    for prefix, new in zip(prefixes, news, strict=True):
        total = new + (prefix if window is None else min(prefix, window))
        has_mask = window is not None or prefix > 0
        lengths.append(max(1, min(new, _MASK_SCORES // total)) if has_mask else new)
    if all(length == new for length, new in zip(lengths, news, strict=True)):
        return rows, prefixes, news
    pieces = [
        (i, prefixes[i] + max(0, end - length), min(length, end))
        for i, length in enumerate(lengths)
        for end in reversed(range(news[i], 0, -length))
    ]
    places, prefixes, news = zip(*pieces, strict=True)
    return rows[torch.tensor(places)], prefixes, news


def divide(
    prefixes: Sequence[int], news: Sequence[int], max_rows: int | None = None, has_masks: bool = False
) -> list[list[int]]:
    """Divide requests, by their places, into groups with little padding; one group keeps their order.

    A group of several requests has at most `max_rows` of keys, and if it `has_masks` as many scores as a mask may have.
    """
    totals = [prefix + new for prefix, new in zip(prefixes, news, strict=True)]
    costs = [_cost(new, total) for new, total in zip(news, totals, strict=True)]

    def fits(count: int, most_new: int, most_total: int, real: float) -> bool:
        rows = count * most_total
        if count > 1 and max_rows is not None and rows > max_rows:
            return False
        if count > 1 and has_masks and rows * most_new > _MASK_SCORES:
            return False
        cost = count * _cost(most_new, most_total)
        return cost - real <= max(_CALL_ROWS, _PADDED_SHARE * cost)

    if fits(len(news), max(news), max(totals), sum(costs)):
        return [list(range(len(news)))]
    parts: list[list[int]] = []
    most_new = most_total = 0
    real = 0.0
    for i in sorted(range(len(news)), key=lambda i: (news[i], totals[i]), reverse=True):
        total = max(most_total, totals[i])
        if parts and fits(len(parts[-1]) + 1, most_new, total, real + costs[i]):
            parts[-1].append(i)
            most_total, real = total, real + costs[i]
        else:
            parts.append([i])
            most_new, most_total, real = news[i], totals[i], costs[i]
    return parts


def _cost(new: int, total: int) -> float:
    """Time of a request in the time of reading a row."""
    return new + total + new * total / _ROW_SCORES


def _group(
    table: Tensor,
    rows: Tensor,
    prefixes: Sequence[int],
    news: Sequence[int],
    part: list[int],
    starts: Tensor,
    dtype: torch.dtype,
    window: int | None,
) -> Group:
    places = torch.tensor(part)
    prefix = torch.tensor([prefixes[i] for i in part])
    new = torch.tensor([news[i] for i in part])
    last = prefix + new - 1
    first = torch.zeros_like(prefix) if window is None else (prefix - window).clamp_(min=0)
    num_queries, num_keys = int(new.max()), int((last - first).max()) + 1
    positions = first[:, None] + torch.arange(num_keys)  # [count, num_keys]
    slots = table[rows[places, None], positions.minimum(last[:, None])]
    offsets = torch.arange(num_queries)
    is_dense = len(part) == len(news) and part[0] == 0 and int(new.min()) == num_queries
    tokens = None if is_dense else (starts[places, None] + offsets.minimum(new[:, None] - 1)).flatten()
    is_causal = window is None and num_queries > 1 and int(prefix.max()) == 0
    seen = None
    if not is_causal and (num_queries > 1 or int((last - first).min()) + 1 < num_keys):
        seen = Seen(positions, (prefix[:, None] + offsets).minimum(last[:, None]), window, dtype)
    return Group(len(part), num_queries, num_keys, tokens, slots.flatten(), seen, is_causal)


def plan_trees(
    table: Tensor, rows: Tensor, num_before: Tensor, tree_mask: Tensor, *, dtype: torch.dtype, window: int | None = None
) -> AttentionPlan:
    """Plan one call for B requests, each with a tree of n drafted tokens (`speculation.py`) after those in the cache.

    A drafted token sees what is before the draft (`num_before` [B] tokens, their slots first in the table's row), its
    ancestors and itself: `tree_mask` [B * n * n], or more, bool. The others are as of `plan_attention`.
    """
    count = len(rows)
    num_nodes = math.isqrt(len(tree_mask) // count)
    trees = tree_mask[: count * num_nodes**2].view(count, num_nodes, num_nodes).bool()
    num_keys = int(num_before.max()) + num_nodes
    before, keys = num_before[:, None], torch.arange(num_keys)
    slots = table[rows.long()[:, None], keys.minimum(before + num_nodes - 1)]  # padding repeats the last slot
    node = keys - before  # [B, num_keys], which node of the tree a key is
    in_tree = (node >= 0) & (node < num_nodes)
    sees = trees.gather(2, node.clamp(0, num_nodes - 1)[:, None].expand(-1, num_nodes, -1)) & in_tree[:, None]
    sees |= (node < 0)[:, None]
    if window is not None:
        depths = trees.sum(-1) - 1  # [B, n]
        position = torch.where(in_tree, before + depths.gather(1, node.clamp(0, num_nodes - 1)), keys)
        sees &= position[:, None] >= (before + depths)[..., None] - window
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -math.inf)[:, None]
    return AttentionPlan((Group(count, num_nodes, num_keys, None, slots.flatten(), mask, False),), None)


def attend(
    plan: AttentionPlan, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """query [T, H, D] of the new tokens, keys [N, K, D] and values [N, K, V] of all slots → [T, H, V].

    `sinks` [H] are scores that take part in each softmax without a value.
    """
    outs = [_attend(group, query, keys, values, scale, sinks) for group in plan.groups]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if plan.places is None else out.index_select(0, plan.places)


def _attend(group: Group, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    count, num_queries = group.count, group.num_queries
    if group.tokens is not None:
        query = query.index_select(0, group.tokens)
    num_heads, num_groups = query.size(1), keys.size(1)
    key, value = (  # [count, K, num_keys, D], [count, K, num_keys, V]
        cache.index_select(0, group.slots).view(count, group.num_keys, *cache.shape[1:]).transpose(1, 2).to(query.dtype)
        for cache in (keys, values)
    )
    mask = group.mask.mask() if isinstance(group.mask, Seen) else group.mask
    if num_queries == 1 and query.dtype is torch.float32:
        # Heads that share keys are queries of one head. (In bf16 torch's kernel is slower so.)
        query = query.view(count, num_groups, num_heads // num_groups, -1)
        by_query = None if sinks is None else sinks.view(num_groups, -1)
        out = _softmax_sums(query, key, value, mask, False, scale, by_query)
        return out.reshape(count, num_heads, -1)
    query = query.view(count, num_queries, num_heads, -1).transpose(1, 2)
    by_query = None if sinks is None else sinks[:, None]
    out = _softmax_sums(query, key, value, mask, group.is_causal, scale, by_query)
    return out.transpose(1, 2).reshape(count * num_queries, num_heads, -1)


def _softmax_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """query [count, heads, num_queries, D] → [count, heads, num_queries, V]; `sinks` [heads, num_queries, or 1]."""
    repeat = query.size(1) // key.size(1)
    if sinks is None:
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=repeat > 1
        )
    if repeat > 1:
        key, value = (heads.repeat_interleave(repeat, 1) for heads in (key, value))
    # The public function keeps the logarithm of the softmax's sum, by which a sink's share can be taken off, to itself.
    out, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return (out * torch.sigmoid(logs - sinks.float())[..., None]).to(out.dtype)
