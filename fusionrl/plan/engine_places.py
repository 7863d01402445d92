"""Devices of the engines: sizes that come out even, one after the other."""

from collections.abc import Sequence

from fusionrl.base.wording import dividing
from fusionrl.config.config import Config
from fusionrl.config.engine_groups import FLAG, eval_group, serving_groups
from fusionrl.config.run_parts import uses_engines, uses_trainers

Bundles = tuple[tuple[int, ...], ...]


SIZE_FLAG = "--rollout-num-gpus-per-engine"


def place_one_by_one(
    sizes: Sequence[int], first: int, per_node: int, size_flag: str = SIZE_FLAG, *, may_skip: bool = False
) -> Bundles:
    """Return the devices, from `first` on, of engines of these sizes: one after the other.

    An engine larger than a node of `per_node` devices begins where a node does, and must take whole nodes. `may_skip`:
    leave devices idle, where one that fits on a node would span two.
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
    """Return the devices, from `first` on, of the engines that evaluate and do nothing else (--eval-num-gpus)."""
    cluster, flag = config.cluster, SIZE_FLAG
    count, size, group = config.eval.eval_num_gpus, cluster.rollout_num_gpus_per_engine, eval_group(config)
    if group is not None:
        size, flag = group.per_engine, f"{FLAG} {group.name}: per_engine"
        if count != group.num_gpus:
            raise ValueError(f"--eval-num-gpus {count}: {FLAG} {group.name} has {group.num_gpus} devices; leave it out")
    return place_engines("--eval-num-gpus", flag, count, size, first, cluster.num_gpus_per_node)


def engine_sizes(config: Config) -> list[int]:
    """Return the devices of each of the policy's engines."""
    cluster = config.cluster
    if not uses_engines(config):
        return []
    count = cluster.rollout_num_gpus or 1
    if cluster.rollout_num_gpus is None and cluster.colocate and uses_trainers(config):
        count = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if groups := serving_groups(config):
        total = sum(group.num_gpus for group in groups)
        if count != total:
            raise ValueError(f"--rollout-num-gpus {count}: the groups of {FLAG} have {total} devices; leave it out")
        return [group.per_engine for group in groups for _ in range(group.num_engines)]
    return _equal_sizes("--rollout-num-gpus", SIZE_FLAG, count, cluster.rollout_num_gpus_per_engine)


def _equal_sizes(flag: str, size_flag: str, count: int, size: int) -> list[int]:
    if count % size:
        raise ValueError(f"{flag} {count} is not a multiple of {size_flag} {size}; {dividing(count, size)}")
    return [size] * (count // size)


def check_engine_size(size_flag: str, size: int, per_node: int) -> None:
    """Check that an engine larger than a node takes whole nodes: SGLang wants as many ranks on each."""
    if size > per_node and size % per_node:
        below, above = size // per_node * per_node, -(-size // per_node) * per_node
        raise ValueError(
            f"{size_flag} {size}: an engine over several nodes takes whole ones, of --num-gpus-per-node {per_node}"
            f" devices; take {below} or {above}"
        )


def place_engines(flag: str, size_flag: str, count: int, size: int, first: int, per_node: int) -> Bundles:
    """Return the devices of each engine, from `first` on: `count` devices (of `flag`), `size` an engine.

    None of them spans two nodes of `per_node` devices if it fits on one.
    """
    return place_one_by_one(_equal_sizes(flag, size_flag, count, size), first, per_node, size_flag, may_skip=True)
