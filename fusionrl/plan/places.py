"""Devices of the engines that come after the trainers and the policy's own engines."""

from __future__ import annotations

from fusionrl.config.config import Config
from fusionrl.config.divisors import dividing

Bundles = tuple[tuple[int, ...], ...]


def place_evaluation(config: Config, first: int) -> Bundles:
    """Return the devices, from `first` on, of the engines that evaluate and do nothing else (--eval-num-gpus).

    Raises:
        ValueError: they do not come out even.
    """
    cluster, flag = config.cluster, "--rollout-num-gpus-per-engine"
    size, per_node = cluster.rollout_num_gpus_per_engine, cluster.num_gpus_per_node
    return place_engines("--eval-num-gpus", flag, config.eval.eval_num_gpus, size, first, per_node)


def place_engines(flag: str, size_flag: str, count: int, size: int, first: int, per_node: int) -> Bundles:
    """Return the devices of each engine, from `first` on: `count` devices (of `flag`), `size` an engine.

    None of them spans two nodes of `per_node` devices: one that does not fit on what is left of a node begins on the
    next.

    Raises:
        ValueError: the engines do not come out even.
    """
    if count % size:
        raise ValueError(f"{flag} {count} is no multiple of {size_flag} {size}; {dividing(count, size)}")
    bundles = []
    for _ in range(count // size):
        left = per_node - first % per_node
        if size > left:
            first += left
        bundles.append(tuple(range(first, first + size)))
        first += size
    return tuple(bundles)
