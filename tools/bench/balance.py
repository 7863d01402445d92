"""Compare fusionrl's division of samples with verl's on the same lengths, under the same cost and constraints.

    pip install --no-deps --target DIR verl==0.9.1 tensordict omegaconf
    python tools/bench/balance.py --verl DIR [--run RUN] [--turns 3] [--json FILE]

For every row the samples are divided over data-parallel ranks, and each rank's into micro-batches under a cap of
tokens, the same number on all ranks. Printed, ours and verl's side by side: the costliest rank over the lower bound of
the instance (its mean, or its costliest single sample), the micro-batches that each needs, tokens over the cap, the
seconds that planning took (median of turns, one after the other), and the share of time that a 1F1B pipeline of 4
stages stands idle on the slowest rank. More micro-batches leave a pipeline less idle, so for that share both plan for
the same number: the larger of what the two need and of four a stage.
Exit code 1 where ours passes 1.02 of the lower bound, passes the cap, takes over a second, or is worse than verl's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.observe.rollouts import read_rollouts
from fusionrl.plan.balance import SequenceCost, bubble, enough_for, pack_ranks, split_by_cost

COST = SequenceCost(linear=24576.0, quadratic=1.0)  # verl's own weights: what it balances by cannot be given to it
STAGES = 4
Planner = Callable[..., tuple[list[list[int]], list[list[list[int]]]]]
Plan = tuple[list[list[int]], list[list[list[int]]]]


def _lower_bound(costs: np.ndarray, count: int) -> float:
    """Return a lower bound of the costliest of `count` parts: the mean, or the costliest single item."""
    return max(float(costs.sum()) / count, float(costs.max(initial=0.0)))


@dataclass(frozen=True)
class Instance:
    """Lengths to divide: over `ranks`, with or without equal numbers of samples, under `cap` tokens."""

    name: str
    lengths: np.ndarray
    ranks: int
    equal_counts: bool
    cap: int


def lognormal(count: int, mean: float, sigma: float, longest: int, seed: int) -> np.ndarray:
    """Long-tailed lengths, cut off at `longest`."""
    values = np.random.default_rng(seed).lognormal(np.log(mean), sigma, count)
    return np.clip(values, 16, longest).astype(np.int64)


def instances(recorded: np.ndarray | None) -> list[Instance]:
    rows = []
    for count, ranks in ((512, 8), (4096, 32), (16384, 64)):
        for sigma, longest in ((0.6, 8192), (1.2, 32768)):
            lengths = lognormal(count, 1500.0, sigma, longest, seed=count)
            for equal in (True, False):
                rows.append(Instance(f"lognormal {sigma}, up to {longest:,}", lengths, ranks, equal, 2 * longest))
    if recorded is not None:
        for ranks in (4, 16):
            count = recorded.size // ranks * ranks
            cap = 4 * int(recorded.max())
            rows += [Instance("recorded", recorded[:count], ranks, equal, cap) for equal in (True, False)]
    return rows


def recorded_lengths(run: Path) -> np.ndarray:
    """Tokens of every sample that the run generated, in the order of its rollouts."""
    lengths = [len(row["tokens"]) for row in read_rollouts(run, "train")]
    if not lengths:
        raise SystemExit(f"--run {run}: it has no training rollouts in its folder rollouts")
    return np.array(lengths, dtype=np.int64)


def ours(instance: Instance, count: int = 1, stages: int = 1) -> Plan:
    costs = COST(instance.lengths)
    ranks = split_by_cost(costs, instance.ranks, equal_counts=instance.equal_counts)
    return ranks, pack_ranks(ranks, instance.lengths[:, None], costs, (instance.cap,), stages=stages, min_count=count)


def verls(instance: Instance, count: int = 1, stages: int = 1) -> Plan:
    import torch
    from tensordict import TensorDict
    from verl.utils import seqlen_balancing as verl

    work = verl.calculate_workload(torch.from_numpy(instance.lengths)).tolist()
    ranks = verl.get_seqlen_balanced_partitions(work, instance.ranks, equal_size=instance.equal_counts)
    batches = []
    for items in ranks:
        lengths = torch.from_numpy(instance.lengths[items])
        tokens = torch.nested.nested_tensor(
            [torch.zeros(int(n), dtype=torch.int8) for n in lengths], layout=torch.jagged
        )
        batches.append(TensorDict({"input_ids": tokens}, batch_size=len(items)))
    # What its collective does over ranks: all take the largest number, until it is the same on all.
    while True:
        found = [verl.rearrange_micro_batches(batch, instance.cap, min_num_micro_batch=count)[1] for batch in batches]
        if len({len(bins) for bins in found}) == 1:
            break
        count = max(len(bins) for bins in found)
    return ranks, [[[items[i] for i in b] for b in bins] for items, bins in zip(ranks, found, strict=True)]


def judge(instance: Instance, plan: Plan) -> dict[str, Any]:
    """The quality of a plan."""
    costs = COST(instance.lengths)
    ranks, micro = plan
    assert sorted(i for rank in ranks for i in rank) == list(range(len(costs)))
    for items, bins in zip(ranks, micro, strict=True):
        assert sorted(i for b in bins for i in b) == sorted(items)
    loads = np.array([costs[rank].sum() for rank in ranks])
    over = sum(max(int(instance.lengths[b].sum()) - instance.cap, 0) for bins in micro for b in bins)
    return {
        "over_bound": float(loads.max()) / _lower_bound(costs, instance.ranks),
        "over_mean": float(loads.max() / loads.mean()),
        "micro_batches": len(micro[0]),
        "tokens_over_cap": over,
    }


def idle(instance: Instance, plan: Plan) -> float:
    """Share of the time that the pipeline of the costliest rank stands idle."""
    costs = COST(instance.lengths)
    return max(bubble([float(costs[b].sum()) for b in bins], STAGES) for bins in plan[1])


def timed(plan: Planner, instance: Instance) -> tuple[Plan, float]:
    start = time.perf_counter()
    result = plan(instance)
    return result, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verl", type=Path, help="folder that verl is installed in; without it only ours is measured")
    parser.add_argument("--run", type=Path, help="folder of a run: the lengths of its rollouts' samples, as rows more")
    parser.add_argument("--turns", type=int, default=3, help="times that each plan is made")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    recorded = recorded_lengths(options.run) if options.run else None
    contestants: dict[str, Planner] = {"fusionrl": ours}
    if options.verl:
        sys.path.append(str(options.verl))
        contestants["verl"] = verls
    print(
        "| lengths | samples | ranks | equal numbers | cost / lower bound | micro-batches | bubble | over the cap | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    results, failures = [], []
    for instance in instances(recorded):
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        found: dict[str, dict[str, Any]] = {}
        for _ in range(options.turns):
            for name, plan in contestants.items():
                result, took = timed(plan, instance)
                seconds[name].append(took)
                found[name] = judge(instance, result)
        for name in contestants:
            found[name]["seconds"] = statistics.median(seconds[name])
        count = max(enough_for(STAGES), *(found[name]["micro_batches"] for name in contestants))
        for name, plan in contestants.items():
            found[name]["bubble"] = idle(instance, plan(instance, count, STAGES))
        entry = {
            "lengths": instance.name,
            "samples": int(instance.lengths.size),
            "ranks": instance.ranks,
            "equal_counts": instance.equal_counts,
            "cap": instance.cap,
            **found,
        }
        results.append(entry)

        def both(form: str, key: str, found: dict[str, dict[str, Any]] = found) -> str:
            return " / ".join(form.format(found[name][key]) for name in contestants)

        print(
            f"| {instance.name} | {instance.lengths.size:,} | {instance.ranks} | "
            f"{'yes' if instance.equal_counts else 'no'} | {both('{:.6f}', 'over_bound')} | "
            f"{both('{}', 'micro_batches')} | {both('{:.3f}', 'bubble')} | {both('{}', 'tokens_over_cap')} | "
            f"{both('{:.3f}', 'seconds')} |",
            flush=True,
        )
        mine, theirs = found["fusionrl"], found.get("verl")
        checks = {
            "cost over 1.02 of the lower bound": mine["over_bound"] > 1.02,
            "tokens over the cap": mine["tokens_over_cap"] > 0,
            "planning over a second": mine["seconds"] > 1.0,
        }
        if theirs:
            checks["cost above verl's"] = mine["over_bound"] > theirs["over_bound"] * (1 + 1e-5)
            checks["bubble above verl's"] = mine["bubble"] > theirs["bubble"] + 1e-3
            checks["slower than verl"] = mine["seconds"] > theirs["seconds"]
        failures += [f"{instance.name}, {instance.ranks} ranks: {what}" for what, failed in checks.items() if failed]
    for failure in failures:
        print(failure)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
