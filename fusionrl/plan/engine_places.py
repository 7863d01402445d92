"""Devices of the engines that come after the trainers and the policy's own engines."""

from __future__ import annotations

from collections.abc import Sequence

from fusionrl.config.config import Config
from fusionrl.config.divisors import dividing
from fusionrl.config.engine_groups import FLAG, eval_group, serving_groups

Bundles = tuple[tuple[int, ...], ...]


SIZE_FLAG = "--rollout-num-gpus-per-engine"


def place_one_by_one(
    sizes: Sequence[int], first: int, per_node: int, size_flag: str = SIZE_FLAG, *, may_skip: bool = False
) -> Bundles:
    """Return the devices, from `first` on, of engines of these sizes: one after the other.

    An engine larger than a node of `per_node` devices begins where a node does.

    may_skip  leave devices idle, where one that fits on a node would span two

    Raises:
        ValueError: such an engine does not take whole nodes.
    """
    bundles = []
    for size in sizes:
        check_engine_size(size_flag, size, per_node)
        left = -first % per_node
        if size > per_node or (may_skip and 0 < left < size):
            first += left
        bundles.append(tuple(range(first, first + size)))
        first += size
    return tuple(bundles)


def place_evaluation(config: Config, first: int) -> Bundles:
    """Return the devices, from `first` on, of the engines that evaluate and do nothing else (--eval-num-gpus).

    Raises:
        ValueError: they do not come out even.
    """
    cluster, flag = config.cluster, SIZE_FLAG
    count, size, group = config.eval.eval_num_gpus, cluster.rollout_num_gpus_per_engine, eval_group(config)
    if group is not None:
        size, flag = group.per_engine, f"{FLAG} {group.name}: per_engine"
        if count != group.num_gpus:
            raise ValueError(f"--eval-num-gpus {count}: {FLAG} {group.name} has {group.num_gpus} devices; leave it out")
    return place_engines("--eval-num-gpus", flag, count, size, first, cluster.num_gpus_per_node)


def engine_sizes(config: Config, count: int) -> list[int]:
    """Return the devices of each of the policy's engines, which have `count` devices in all.

    Raises:
        ValueError: they do not come out even.
    """
    if groups := serving_groups(config):
        total = sum(group.num_gpus for group in groups)
        if count != total:
            raise ValueError(f"--rollout-num-gpus {count}: the groups of {FLAG} have {total} devices; leave it out")
        return [group.per_engine for group in groups for _ in range(group.num_engines)]
    size = config.cluster.rollout_num_gpus_per_engine
    if count % size:
        raise ValueError(
            f"--rollout-num-gpus {count} is not a multiple of --rollout-num-gpus-per-engine {size};"
            f" {dividing(count, size)}"
        )
    return [size] * (count // size)


def check_engine_size(size_flag: str, size: int, per_node: int) -> None:
    """Check that an engine larger than a node takes whole nodes: SGLang wants as many ranks on each.

    Raises:
        ValueError: it does not.
    """
    if size > per_node and size % per_node:
        below, above = size // per_node * per_node, -(-size // per_node) * per_node
        raise ValueError(
            f"{size_flag} {size}: an engine over several nodes takes whole ones, of --num-gpus-per-node {per_node}"
            f" devices; take {below} or {above}"
        )


def place_engines(flag: str, size_flag: str, count: int, size: int, first: int, per_node: int) -> Bundles:
    """Return the devices of each engine, from `first` on: `count` devices (of `flag`), `size` an engine.

    None of them spans two nodes of `per_node` devices if it fits on one.

    Raises:
        ValueError: the engines do not come out even.
    """
    if count % size:
        raise ValueError(f"{flag} {count} is not a multiple of {size_flag} {size}; {dividing(count, size)}")
    return place_one_by_one([size] * (count // size), first, per_node, size_flag, may_skip=True)
