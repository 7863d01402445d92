"""Attention of drafted tokens (`speculation.py`): each sees what is before the draft, its ancestors and itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusionrl.cpu.batched_attention import AttentionPlan, Group


def plan_trees(
    table: Tensor, rows: Tensor, num_before: Tensor, tree_mask: Tensor, *, dtype: torch.dtype, window: int | None = None
) -> AttentionPlan:
    """Plan one call for B requests, each with a tree of n new tokens after the tokens that the cache holds.

    Args:
        table: [any, longest] slot of each token of each request; those of the tree come after those before it
        rows: [B] row of the table
        num_before: [B] tokens before the tree
        tree_mask: [B * n * n], or more, bool: which nodes a node sees
        dtype: of the queries
        window: a query sees so many positions before its own; None: all of them
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
