"""How many samples a step has, and how they are divided over data-parallel ranks and into micro-batches. Pure.

Every function gives the same answer for the same input, everywhere. Ranks get equal cost; a rank's micro-batches keep
to limits that are never passed (tokens, samples), and cost about the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusionrl.base.wording import counted, dividing
from fusionrl.plan.costs import ImageCost, SequenceCost

# Exchanges between the costliest and the cheapest rank (or micro-batch) after the first division; each makes the
# difference smaller, and beyond some hundreds nothing is left to gain.
MAX_EXCHANGES = 600

Limits = Sequence[int]


@dataclass(frozen=True)
class Balance:
    """The settings by which a step is divided over ranks and micro-batches.

    cost           of a sequence
    max_tokens     of a micro-batch, over all ranks of a context-parallel group; never passed
    max_samples    of a micro-batch, or None
    pad_to         each sequence is padded to a multiple of this (context and sequence parallelism)
    stages         pipeline stages
    multiple       the number of micro-batches is a multiple of this
    share_prompts  whether the trainer computes the prompt of siblings in one micro-batch once
    images         cost of an image, which a micro-batch computes once however often it has it
    max_image_tokens  of all different images of a micro-batch; passed only by one sample that has more. None: no limit
    dense_within   tokens of a sample that trainers attend to as the model does (sparse attention); None: any
    """

    cost: SequenceCost
    max_tokens: int
    max_samples: int | None = None
    pad_to: int = 1
    stages: int = 1
    multiple: int = 1
    share_prompts: bool = False
    images: ImageCost | None = None
    max_image_tokens: int | None = None
    dense_within: int | None = None

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Lengths as the trainer packs them."""
        return -(-lengths // self.pad_to) * self.pad_to


Images = Sequence[Mapping[str, int]]
"""Of each sample: key of an image → its tokens."""


def divide(
    lengths: np.ndarray,
    prompts: np.ndarray,
    groups: Sequence[Sequence[int]],
    ranks: int,
    balance: Balance,
    images: Images = (),
) -> list[list[list[int]]]:
    """The samples of one optimizer step, over data-parallel ranks and micro-batches.

    Siblings that share a prompt are kept together where the trainer computes the prompt once and no rank gets more to
    do by it: their cost together is less than apart, but larger pieces divide less evenly.

    lengths  [n] tokens of each sample; with its padding none is over `max_tokens`
    prompts  [n] tokens of each sample's prompt
    groups   the samples, siblings together; every sample is in one group
    images   those of each sample; none where no sample has one

    Returns data-parallel rank → micro-batch → samples.
    """
    padded = balance.padded(lengths)
    assert int(padded.max(initial=0)) <= balance.max_tokens, "a sample over the cap"
    singles = [[i] for group in groups for i in group]
    best = _divide(singles, padded, prompts, ranks, balance, images)
    if balance.share_prompts and len(singles) > len(groups):
        units = [unit for group in groups for unit in _fitting(group, padded, balance, images)]
        together = _divide(units, padded, prompts, ranks, balance, images)
        if together[0] <= best[0]:
            best = together
    return best[1]


def _fitting(group: Sequence[int], padded: np.ndarray, balance: Balance, images: Images) -> list[list[int]]:
    """Siblings in as few parts as fit into a micro-batch each, in their order."""
    units: list[list[int]] = [[]]
    room = balance.max_tokens
    for i in group:
        is_full = padded[i] > room or len(units[-1]) == balance.max_samples
        if images and balance.max_image_tokens is not None:
            before, after = (sum(_images_of(unit, images).values()) for unit in (units[-1], [*units[-1], i]))
            is_full |= after > max(balance.max_image_tokens, before)  # where one sample passes it, too
        if units[-1] and is_full:
            units.append([])
            room = balance.max_tokens
        units[-1].append(i)
        room -= int(padded[i])
    return units


def _images_of(unit: Sequence[int], images: Images) -> dict[str, int]:
    """The different images of these samples, and their tokens."""
    return {key: count for i in unit for key, count in images[i].items()}


def _divide(
    units: list[list[int]],
    padded: np.ndarray,
    prompts: np.ndarray,
    ranks: int,
    balance: Balance,
    images: Images,
) -> tuple[float, list[list[list[int]]]]:
    """(cost of the costliest rank, rank → micro-batch → samples), each unit whole."""
    costs = np.array([balance.cost(padded[unit]).sum() for unit in units])
    costs -= np.array([float(balance.cost(prompts[unit[1:]]).sum()) for unit in units])
    needs = np.array([[padded[unit].sum(), len(unit)] for unit in units]).reshape(-1, 2)
    limits = [balance.max_tokens, balance.max_samples or max(len(padded), 1)]
    if images and balance.images is not None:
        different = [list(_images_of(unit, images).values()) for unit in units]
        costs += np.array([sum(map(balance.images, counts)) for counts in different])
        if (limit := balance.max_image_tokens) is not None:  # what has more fills a micro-batch, but for texts
            needs = np.column_stack([needs, [min(sum(counts), limit) for counts in different]])
            limits.append(limit)
    per_rank = split_by_cost(costs, ranks)
    micro = pack_ranks(per_rank, needs, costs, limits, stages=balance.stages, multiple=balance.multiple)
    most = max(float(costs[items].sum()) for items in per_rank)
    return most, [[sorted(i for unit in members for i in units[unit]) for members in bins] for bins in micro]


def split_by_cost(costs: np.ndarray, count: int) -> list[list[int]]:
    """Divide items into `count` parts of equal cost: the costliest first to the cheapest part, then exchanges.

    `costs` [n] are not negative. Returns the items of each part, ascending.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, part) for part in range(count)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (load + float(costs[item]), part))
    _exchange(parts, costs, np.zeros((costs.size, 0), np.int64), ())
    return [sorted(part) for part in parts]


def _exchange(parts: list[list[int]], costs: np.ndarray, needs: np.ndarray, limits: Limits) -> None:
    """Swap items (or move one) between the costliest part and a cheaper one while that brings them closer.

    No part passes the k limits by it; `needs` [n, k] is what each item takes of them.
    """
    loads = np.array([costs[part].sum() for part in parts])
    used = np.array([needs[part].sum(axis=0) for part in parts])
    for _ in range(MAX_EXCHANGES):
        high, room = int(loads.argmax()), np.array(limits) - used
        for low in np.argsort(loads, kind="stable")[:8].tolist():
            gap = float(loads[high] - loads[low])
            if low != high and gap > 1e-8 * loads[high]:
                pair = _best_exchange(parts[high], parts[low], costs, gap, needs, room[high], room[low])
                if pair is not None:
                    break
        else:
            return
        give, take = pair
        change, moved = float(costs[give]), needs[give]
        parts[high].remove(give)
        parts[low].append(give)
        if take is not None:
            change, moved = change - float(costs[take]), moved - needs[take]
            parts[low].remove(take)
            parts[high].append(take)
        loads[high] -= change
        loads[low] += change
        used[high] -= moved
        used[low] += moved


def _best_exchange(
    giving: list[int],
    taking: list[int],
    costs: np.ndarray,
    gap: float,
    needs: np.ndarray,
    giving_room: np.ndarray,
    taking_room: np.ndarray,
) -> tuple[int, int | None] | None:
    """(item to give, item to take or None) whose difference in cost is nearest to half the gap; None: none helps."""
    give, take = np.array(giving), np.array([*taking, -1])  # -1: nothing is taken
    if not give.size:
        return None
    change = costs[give][:, None] - np.where(take >= 0, costs[take], 0.0)[None, :]
    badness = np.abs(change - gap / 2)
    # Beyond this nothing is gained: the two would only change places.
    badness[(change <= 0) | (change >= gap)] = np.inf
    for k in range(needs.shape[1]):
        moved = needs[give, k][:, None] - np.where(take >= 0, needs[take, k], 0)[None, :]
        badness[(moved > taking_room[k]) | (-moved > giving_room[k])] = np.inf
    best = int(badness.argmin())
    if not np.isfinite(badness.flat[best]):
        return None
    row, column = divmod(best, take.size)
    chosen = int(take[column])
    return int(give[row]), chosen if chosen >= 0 else None


def pack(needs: np.ndarray, costs: np.ndarray, limits: Limits, count: int | None = None) -> list[list[int]] | None:
    """Divide items into bins of about equal cost that keep to limits.

    `needs` [n, k] is what each item takes of each limit (tokens, samples); none alone is over a limit. `count` is the
    number of bins; the smallest that was found, if not given. More bins than items leave some empty.

    Returns the items of each bin, ascending; None where `count` bins do not hold them (or no way was found).
    """
    assert not needs.size or (needs.max(axis=0) <= limits).all(), "an item over a limit"
    if count is not None:
        bins = _spread(needs, costs, limits, count) or _first_fit(needs, limits)
        if len(bins) > count:
            return None
        bins += [[] for _ in range(count - len(bins))]
        _exchange(bins, costs, needs, limits)
        return [sorted(members) for members in bins]
    together = (-(-int(need.sum()) // limit) for need, limit in zip(needs.T, limits, strict=True))
    low, high = max(1, *together), max(1, len(_first_fit(needs, limits)))
    while low < high:  # spreading may do with fewer
        middle = (low + high) // 2
        if _spread(needs, costs, limits, middle) is None:
            low = middle + 1
        else:
            high = middle
    return pack(needs, costs, limits, high)


def _spread(needs: np.ndarray, costs: np.ndarray, limits: Limits, count: int) -> list[list[int]] | None:
    """The costliest item first to the cheapest bin that has room for it."""
    loads, left = np.zeros(count), np.repeat(np.array(limits, dtype=np.int64)[:, None], count, axis=1)
    bins: list[list[int]] = [[] for _ in range(count)]
    for item in np.argsort(-costs, kind="stable").tolist():
        room = (left >= needs[item][:, None]).all(axis=0)
        best = int(np.where(room, loads, np.inf).argmin())
        if not room[best]:
            return None
        bins[best].append(item)
        loads[best] += costs[item]
        left[:, best] -= needs[item]
    return bins


def _first_fit(needs: np.ndarray, limits: Limits) -> list[list[int]]:
    """The largest item first to the first bin that has room: fills bins where spreading left holes in all of them."""
    left = np.repeat(np.array(limits, dtype=np.int64)[:, None], len(needs), axis=1)
    bins: list[list[int]] = []
    for item in np.argsort(-needs[:, 0], kind="stable").tolist():
        best = int((left[:, : len(bins) + 1] >= needs[item][:, None]).all(axis=0).argmax())
        if best == len(bins):
            bins.append([])
        bins[best].append(item)
        left[:, best] -= needs[item]
    return bins


def pack_ranks(
    per_rank: Sequence[Sequence[int]],
    needs: np.ndarray,
    costs: np.ndarray,
    limits: Limits,
    *,
    stages: int = 1,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """Micro-batches of every rank: the same number on each, in the order in which a pipeline runs them.

    `needs`, `costs` and `limits` as of `pack`. For several pipeline stages there are at least `enough_for` them, if a
    rank has as many items; their number is a `multiple` (interleaved stages want one of the pipeline's size).
    """
    rank_items = [np.array(items, dtype=np.int64) for items in per_rank]
    batches = [pack(needs[items], costs[items], limits) for items in rank_items]
    most_items = max((items.size for items in rank_items), default=0)
    count = max(*(len(bins) for bins in batches if bins is not None), min(enough_for(stages), most_items))
    while True:
        count = -(-count // multiple) * multiple
        for rank, items in enumerate(rank_items):
            bins = batches[rank]
            if bins is None or len(bins) != count:
                batches[rank] = pack(needs[items], costs[items], limits, count)
        if all(bins is not None for bins in batches):
            break
        count += 1
    ordered = []
    for items, bins in zip(rank_items, batches, strict=True):
        members = [items[places] for places in bins or []]
        order = pipeline_order(np.array([costs[batch].sum() for batch in members]))
        ordered.append([members[i].tolist() for i in order])
    return ordered


def enough_for(stages: int) -> int:
    """Micro-batches with which a pipeline of `stages` idles little: four a stage (GPipe, arXiv:1811.06965)."""
    return 4 * stages if stages > 1 else 1


def pipeline_order(costs: np.ndarray) -> list[int]:
    """Micro-batches so that neighbours are alike and the small ones are at both ends.

    While a pipeline fills and empties, stages wait for its first and last micro-batches: those should be short. The
    order depends on the ranks of the costs alone, so that micro-batches which run at the same time are alike on all
    data-parallel ranks (experts are exchanged between them).
    """
    order = np.argsort(-costs, kind="stable").tolist()
    return order[::2][::-1] + order[1::2]


@dataclass(frozen=True)
class BatchPlan:
    """The division of one rollout into optimizer steps."""

    num_prompts: int
    num_samples_per_prompt: int
    num_steps: int  # optimizer steps of one rollout
    global_batch_size: int  # samples of one optimizer step
    dp_size: int

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.num_samples_per_prompt

    def describe(self) -> str:
        """The arithmetic in one line."""
        return (
            f"{counted(self.num_prompts, 'prompt')} x {counted(self.num_samples_per_prompt, 'sample')}"
            f" = {counted(self.num_samples, 'sample')} a rollout = {counted(self.num_steps, 'optimizer step')}"
            f" x {counted(self.global_batch_size, 'sample')}, over {counted(self.dp_size, 'rank')}"
        )


def plan_batches(
    *,
    rollout_batch_size: int,
    n_samples_per_prompt: int,
    global_batch_size: int | None,
    num_steps_per_rollout: int | None,
    dp_size: int,
) -> BatchPlan:
    """Work out the missing one of --global-batch-size and --num-steps-per-rollout."""
    total = rollout_batch_size * n_samples_per_prompt
    product = (
        f"--rollout-batch-size {rollout_batch_size} x --n-samples-per-prompt {n_samples_per_prompt} = {total} samples"
    )
    num_samples_set = (global_batch_size or 0) * (num_steps_per_rollout or 0)
    if num_samples_set and num_samples_set != total:
        raise ValueError(
            f"{product}, but --global-batch-size {global_batch_size} x --num-steps-per-rollout "
            f"{num_steps_per_rollout} = {num_samples_set}; leave one of the two out"
        )
    if global_batch_size is None:
        steps = num_steps_per_rollout or 1
        if total % steps:
            fitting = dividing(total, steps, at_most=total // dp_size)
            raise ValueError(f"{product} do not divide into --num-steps-per-rollout {steps}; {fitting}")
        global_batch_size = total // steps
    if total % global_batch_size:
        fitting = dividing(total, global_batch_size, at_least=dp_size)
        raise ValueError(f"{product} do not divide into steps of --global-batch-size {global_batch_size}; {fitting}")
    if global_batch_size < dp_size:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is smaller than the {dp_size} data-parallel ranks: some would"
            " have nothing to train; raise it or use fewer ranks"
        )
    return BatchPlan(rollout_batch_size, n_samples_per_prompt, total // global_batch_size, global_batch_size, dp_size)
