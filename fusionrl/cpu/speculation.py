"""Speculative decoding with SGLang's n-grams on a CPU, put into SGLang from outside.

To check its drafts on a CPU SGLang needs kernels of a build of `sgl_kernel` that the package registries do not have,
and it then takes the likeliest token whatever the temperature is. The functions here do the kernels' work with torch,
and `sample_tree` samples.

A draft is a tree of `n` nodes for each of B requests; node 0 is the newest token, and ancestors come first. The model
reads all nodes at once. The walk begins at node 0, draws a token of the model's distribution there, moves to the child
that is this token, and ends where no child is. So drafts change the speed and nothing else.
"""

import torch
from torch import Tensor

from fusionrl.cpu.sglang_layers import draw


def read_tree(
    tree_mask: Tensor,
    num_before: Tensor,
    positions: Tensor,
    indices: Tensor,
    first_children: Tensor,
    next_siblings: Tensor,
    batch_size: int,
    num_nodes: int,
) -> None:
    """Write the links of each tree, whose `tree_mask` [B * n * n] says which nodes are a node's ancestors (and itself).

    `num_before` [B] are the tokens before node 0. Written: the position [B * n] of each node's token; its number in the
    batch, first child and next sibling [B, n], -1 for none.
    """
    nodes = torch.arange(num_nodes)
    is_ancestor = tree_mask.view(batch_size, num_nodes, num_nodes).bool() & (nodes < nodes[:, None])
    positions.copy_((is_ancestor.sum(-1) + num_before[:, None]).flatten())
    indices.copy_(torch.arange(batch_size * num_nodes).view(batch_size, num_nodes))
    parents = torch.where(is_ancestor, nodes, -1).amax(-1)  # [B, n]
    is_child = parents[:, None] == nodes[:, None]  # [B, parent, node]
    is_sibling = (parents[:, None] == parents[..., None]) & (parents >= 0)[..., None] & (nodes > nodes[:, None])
    for links, is_linked in ((first_children, is_child), (next_siblings, is_sibling)):
        links.copy_(torch.where(is_linked.any(-1), is_linked.int().argmax(-1), -1))


def walk_tree(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow, in each tree, the children that are the tokens `target_predict`. The names are those that SGLang passes.

    Read [B, n]: the token of each node (`candidates`), its number, first child and next sibling, and the token that
    follows it. Written: at the nodes of the walk, the token that follows (`predicts` [B * n]); the nodes of the walk by
    their numbers, -1 after the last one (`accept_index` [B, longest]); how many drafted tokens were taken.
    """
    tokens, targets = candidates.tolist(), target_predict.tolist()
    children, siblings, numbers = (
        tensor.tolist() for tensor in (retrive_next_token, retrive_next_sibling, retrive_index)
    )
    for row in range(len(tokens)):
        node, walk = 0, [0]
        while len(walk) < accept_index.shape[1]:
            child = children[row][node]
            while child >= 0 and tokens[row][child] != targets[row][node]:
                child = siblings[row][child]
            if child < 0:
                break
            node = child
            walk.append(node)
        places = torch.tensor([numbers[row][node] for node in walk])
        accept_index[row, : len(walk)] = places.to(accept_index.dtype)
        predicts[places] = torch.tensor([targets[row][node] for node in walk], dtype=predicts.dtype)
        accept_token_num[row] = len(walk) - 1


def sample_tree(*, candidates: Tensor, target_probs: Tensor, **others: object) -> None:
    """Draw the token that follows each node from `target_probs` [B, n, vocabulary], then `walk_tree`."""
    drawn = draw(target_probs.flatten(0, 1)).view(candidates.shape)
    names = ("predicts", "accept_index", "accept_token_num", "retrive_index", "retrive_next_token")
    tensors = {name: others[name] for name in (*names, "retrive_next_sibling")}
    walk_tree(candidates=candidates, target_predict=drawn, **tensors)


def pack_slots(rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, out: Tensor, width: int) -> None:
    """Write to `out` the slots `starts`..`ends` of each request's row of the table, one request after the other."""
    places = torch.arange(width)
    is_in = (places >= starts[:, None]) & (places < ends[:, None])
    packed = table[rows.long()][is_in]
    out[: len(packed)] = packed.to(out.dtype)


def set_slots(rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, width: int) -> None:
    """Write `slots` to the places `starts`..`ends` of each request's row of the table, one request after the other."""
    first = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[first : first + end - start].to(table.dtype)
        first += end - start


def pack_accepted(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write to `out` the slots of the nodes that `accept_index` names, but for -1, one after the other."""
    accepted = slots[accept_index[accept_index >= 0].long()]
    out[: len(accepted)] = accepted.to(out.dtype)


def keep_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    """probs [N, V], top_ks [N] → probs of the likeliest `top_ks` tokens, those as likely as the last one included."""
    ordered = probs.sort(-1, descending=True).values
    last = ordered.gather(-1, (top_ks.long().clamp(1, probs.shape[-1]) - 1)[:, None])
    return _normalized(probs.masked_fill(probs < last, 0.0))


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """probs [N, V], top_ps [N] → probs of the fewest tokens that have `top_ps` of the probability together."""
    ordered, order = probs.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_ps[:, None], 0.0)
    return _normalized(torch.zeros_like(probs).scatter_(-1, order, ordered))


def _normalized(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def register() -> None:
    """Let SGLang in this process, and in those forked from it, use the functions above. Idempotent.

    Only for a server that speculates: it imports SGLang's speculative decoding.
    """
    from sglang.kernels.ops.speculative import cache_locs, eagle, reconstruct_tree, spec_tree
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import eagle_utils

    cache_locs.assign_extend_cache_locs_cpu = pack_slots
    allocation.assign_req_to_token_pool_cpu = set_slots
    eagle.fill_accept_out_cache_loc_cpu = pack_accepted
    reconstruct_tree.reconstruct_indices_from_tree_mask = read_tree
    spec_tree.sgl_verify_tree_greedy_cpu = walk_tree
    eagle_utils.tree_speculative_sampling_target_only = sample_tree
    eagle_utils.top_k_renorm_prob, eagle_utils.top_p_renorm_prob = keep_top_k, keep_top_p
    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    envs.SGLANG_NATIVE_MOVE_KV_CACHE.set(True)  # else a kernel moves the cache's rows, and is warmed up
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None
