"""Drafts of n-grams on a CPU: their trees, the walk through them, and attention within them."""

import math

import pytest
import torch
from torch import Tensor

from fusionrl.cpu.batched_attention import attend, plan_trees
from fusionrl.cpu.speculation import (
    keep_top_k,
    keep_top_p,
    pack_accepted,
    pack_slots,
    read_tree,
    sample_tree,
    set_slots,
    walk_tree,
)

# Parent of each node of two trees: the first branches at its root and below it, the second is a chain.
PARENTS = [[-1, 0, 1, 0, 1, 3], [-1, 0, 1, 2, 3, 4]]
NUM_NODES = 6


def _ancestors(parents: list[int], node: int) -> list[int]:
    """The node and those before it, the root first."""
    return [] if node < 0 else [*_ancestors(parents, parents[node]), node]


def _mask() -> Tensor:
    mask = torch.zeros(len(PARENTS), NUM_NODES, NUM_NODES, dtype=torch.bool)
    for tree, parents in enumerate(PARENTS):
        for node in range(NUM_NODES):
            mask[tree, node, _ancestors(parents, node)] = True
    return mask


@pytest.fixture
def links() -> dict[str, Tensor]:
    size = (len(PARENTS), NUM_NODES)
    made = {name: torch.full(size, -9) for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling")}
    positions = torch.full((len(PARENTS) * NUM_NODES,), -9)
    read_tree(_mask().flatten(), torch.tensor([10, 20]), positions, *made.values(), len(PARENTS), NUM_NODES)
    return made | {"positions": positions.view(size)}


def test_the_links_of_a_tree(links: dict[str, Tensor]) -> None:
    assert links["positions"].tolist() == [[10, 11, 12, 11, 12, 12], [20, 21, 22, 23, 24, 25]]
    assert links["retrive_index"].flatten().tolist() == list(range(12))
    assert links["retrive_next_token"].tolist() == [[1, 2, -1, 5, -1, -1], [1, 2, 3, 4, 5, -1]]
    assert links["retrive_next_sibling"].tolist() == [[-1, 3, 4, -1, -1, -1], [-1] * 6]


def _walk(links: dict[str, Tensor], candidates: Tensor, **target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    predicts = torch.zeros(candidates.numel(), dtype=torch.int32)
    accepted = torch.full(candidates.shape, -1, dtype=torch.int32)
    counts = torch.empty(len(candidates), dtype=torch.int32)
    walk = walk_tree if "target_predict" in target else sample_tree
    links = {name: tensor for name, tensor in links.items() if name != "positions"}
    walk(predicts=predicts, accept_index=accepted, accept_token_num=counts, candidates=candidates, **links, **target)
    return predicts, accepted, counts


def test_the_walk_follows_the_tokens_that_the_model_takes(links: dict[str, Tensor]) -> None:
    candidates = torch.tensor([[7, 1, 2, 3, 4, 5], [7, 1, 2, 3, 4, 5]])
    target = torch.tensor([[3, 0, 0, 5, 0, 8], [1, 2, 9, 4, 5, 6]])
    predicts, accepted, counts = _walk(links, candidates, target_predict=target)
    assert accepted.tolist() == [[0, 3, 5, -1, -1, -1], [6, 7, 8, -1, -1, -1]]
    assert counts.tolist() == [2, 2]
    assert predicts[[0, 3, 5]].tolist() == [3, 5, 8]
    assert predicts[[6, 7, 8]].tolist() == [1, 2, 9]


def test_drafts_do_not_change_what_is_sampled(links: dict[str, Tensor]) -> None:
    """The first three tokens of a walk are as frequent as without drafts, those that are drafted and the others."""
    torch.manual_seed(4)
    one, count, vocabulary = {name: tensor[:1] for name, tensor in links.items()}, 3000, 5
    candidates = torch.tensor([[4, 1, 2, 3, 4, 0]])
    probs = torch.randn(1, NUM_NODES, vocabulary).mul(1.5).softmax(-1)
    first, second = torch.zeros(vocabulary), torch.zeros(2, vocabulary)  # after the drafted tokens 1 and 3
    for _ in range(count):
        predicts, accepted, counts = _walk(one, candidates, target_probs=probs)
        first[predicts[0]] += 1
        if counts[0]:
            node = int(accepted[0, 1])
            second[0 if node == 1 else 1, predicts[node]] += 1
    for seen, expected in ((first, probs[0, 0]), (second[0], probs[0, 1]), (second[1], probs[0, 3])):
        total = seen.sum()
        assert total > 200
        chi2 = ((seen - expected * total) ** 2 / (expected * total)).sum()
        assert chi2 < vocabulary + 5 * math.sqrt(2 * vocabulary)


def test_slots_are_packed_and_set() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([3, 0]), torch.tensor([5, 3])
    out = torch.zeros(7, dtype=torch.int64)
    pack_slots(rows, table, starts, ends, out, 10)
    assert out.tolist() == [23, 24, 0, 1, 2, 0, 0]
    set_slots(rows, table, starts, ends, torch.tensor([91, 92, 93, 94, 95]), 10)
    assert table[2, 2:6].tolist() == [22, 91, 92, 25]
    assert table[0, :4].tolist() == [93, 94, 95, 3]
    kept = torch.zeros(4, dtype=torch.int64)
    pack_accepted(torch.tensor([[2, -1], [0, 3]]), torch.tensor([50, 51, 52, 53]), kept)
    assert kept.tolist() == [52, 50, 53, 0]


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1]])
    assert torch.allclose(keep_top_k(probs, torch.tensor([1, 2])), torch.tensor([[0, 1.0, 0, 0], [4 / 7, 3 / 7, 0, 0]]))
    kept = keep_top_p(probs, torch.tensor([0.6, 0.4]))
    assert torch.allclose(kept, torch.tensor([[0, 5 / 8, 3 / 8, 0], [1.0, 0, 0, 0]]))


@pytest.mark.parametrize("window", [None, 3])
def test_a_draft_sees_what_is_before_it_and_its_ancestors(window: int | None) -> None:
    torch.manual_seed(0)
    heads, groups, size, num_slots = 4, 2, 8, 60
    before = torch.tensor([2, 9])
    slots = torch.randperm(num_slots).view(2, 30)
    keys, values = torch.randn(num_slots, groups, size), torch.randn(num_slots, groups, size)
    query = torch.randn(2 * NUM_NODES, heads, size)
    plan = plan_trees(slots.int(), torch.tensor([0, 1]), before, _mask().flatten(), dtype=torch.float32, window=window)
    out = attend(plan, query, keys, values, scale=0.3)
    for tree, parents in enumerate(PARENTS):
        start = int(before[tree])
        for node in range(NUM_NODES):
            path = [*range(start), *(start + one for one in _ancestors(parents, node))]
            if window is not None:
                path = path[-window - 1 :]
            own = slots[tree, path]
            for head in range(heads):
                group = head // (heads // groups)
                scores = (keys[own, group].double() @ query[tree * NUM_NODES + node, head].double()) * 0.3
                expected = scores.softmax(-1) @ values[own, group].double()
                assert torch.allclose(out[tree * NUM_NODES + node, head].double(), expected, atol=1e-6)
