"""Batch arithmetic: prompts → samples → optimizer steps → ranks → micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchPlan:
    """How one rollout is cut into optimizer steps."""

    num_prompts: int
    num_samples_per_prompt: int
    num_steps: int  # optimizer steps of one rollout
    global_batch_size: int  # samples of one optimizer step
    dp_size: int

    @property
    def num_samples(self) -> int:
        """Samples of one rollout."""
        return self.num_prompts * self.num_samples_per_prompt

    def describe(self) -> str:
        """The arithmetic in one line."""
        return (
            f"{self.num_prompts} prompts x {self.num_samples_per_prompt} samples = {self.num_samples} samples a rollout"
            f" = {self.num_steps} optimizer steps x {self.global_batch_size} samples, over {self.dp_size} ranks"
        )


def plan_batches(
    *,
    rollout_batch_size: int,
    n_samples_per_prompt: int,
    global_batch_size: int | None,
    num_steps_per_rollout: int | None,
    dp_size: int,
) -> BatchPlan:
    """Work out the missing one of --global-batch-size and --num-steps-per-rollout.

    Raises:
        ValueError: sizes that do not divide, with the arithmetic and the cure.
    """
    total = rollout_batch_size * n_samples_per_prompt
    product = (
        f"--rollout-batch-size {rollout_batch_size} x --n-samples-per-prompt {n_samples_per_prompt} = {total} samples"
    )
    given = (global_batch_size or 0) * (num_steps_per_rollout or 0)
    if given and given != total:
        raise ValueError(
            f"{product}, but --global-batch-size {global_batch_size} x --num-steps-per-rollout "
            f"{num_steps_per_rollout} = {given}; leave one of the two out"
        )
    if global_batch_size is None:
        steps = num_steps_per_rollout or 1
        if total % steps:
            raise ValueError(f"{product} do not divide into --num-steps-per-rollout {steps}")
        global_batch_size = total // steps
    if total % global_batch_size:
        near = [d for d in range(1, total + 1) if total % d == 0]
        best = min(near, key=lambda d: abs(d - (global_batch_size or 0)))
        raise ValueError(
            f"{product} do not divide into steps of --global-batch-size {global_batch_size};"
            f" the nearest that does is {best}"
        )
    if global_batch_size < dp_size:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is smaller than the {dp_size} data-parallel ranks: some would"
            " have nothing to train; raise it or use fewer ranks"
        )
    return BatchPlan(rollout_batch_size, n_samples_per_prompt, total // global_batch_size, global_batch_size, dp_size)


def split_over_ranks(lengths: np.ndarray, dp_size: int) -> list[list[int]]:
    """Deal samples to ranks, the longest first to the rank with the fewest tokens; counts differ by at most one.

    lengths  [n] tokens a sample. Returns the sample indices of each rank, in ascending order.
    """
    order = np.argsort(-lengths, kind="stable")
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    loads = np.zeros(dp_size)
    limit = -(-len(lengths) // dp_size)
    full = len(lengths) % dp_size or dp_size  # how many ranks may reach the limit
    for sample in order:
        reached = sum(len(r) == limit for r in ranks)
        open_ranks = [
            r for r in range(dp_size) if len(ranks[r]) < limit and not (len(ranks[r]) == limit - 1 and reached >= full)
        ]
        best = min(open_ranks, key=lambda r: (loads[r], r))
        ranks[best].append(int(sample))
        loads[best] += lengths[sample]
    return [sorted(r) for r in ranks]


def pack_micro_batches(
    lengths: np.ndarray, max_tokens: int, max_samples: int | None, counts: np.ndarray | None = None
) -> list[list[int]]:
    """First-fit, longest first: micro-batches of at most `max_tokens` tokens (and `max_samples` samples).

    lengths  [n] tokens of each item; counts  [n] samples of each item (1 each, unless items are whole groups).
    An item longer than `max_tokens` gets a micro-batch of its own. Returns the items of each micro-batch.
    """
    sizes = np.ones(len(lengths), np.int64) if counts is None else counts
    bins: list[list[int]] = []
    used: list[tuple[int, int]] = []  # tokens and samples of each bin
    for item in np.argsort(-lengths, kind="stable"):
        tokens, samples = int(lengths[item]), int(sizes[item])
        for position, (bin_tokens, bin_samples) in enumerate(used):
            if bin_tokens + tokens <= max_tokens and (max_samples is None or bin_samples + samples <= max_samples):
                bins[position].append(int(item))
                used[position] = (bin_tokens + tokens, bin_samples + samples)
                break
        else:
            bins.append([int(item)])
            used.append((tokens, samples))
    return [sorted(members) for members in bins]


def equalise(micro_batches: list[list[int]], count: int) -> list[list[int]]:
    """Split the fullest micro-batches until there are `count`: every rank must run the same number.

    With fewer samples than `count` the last ones stay empty; the trainers run an empty micro-batch at weight 0.
    """
    bins = [list(members) for members in micro_batches]
    while len(bins) < count and any(len(members) > 1 for members in bins):
        largest = max(range(len(bins)), key=lambda i: len(bins[i]))
        members = bins.pop(largest)
        half = len(members) // 2
        bins += [members[:half], members[half:]]
    return bins + [[] for _ in range(count - len(bins))]
