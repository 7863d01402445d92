"""Ray: start a local cluster or join one, and place devices (bundles) on it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# A CPU has no device that Ray counts: nodes carry this logical one instead, so that placement is the same code.
CPU_DEVICE_RESOURCE = "fusionrl_device"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Bundle:
    """One device: where it is, and how to schedule on it."""

    index: int  # position in the sorted order that the plan counts by
    group_index: int  # index inside the placement group
    node_id: str
    node_address: str
    device_id: int  # GPU id on its node; a running number on a CPU


def start_ray(device: str, num_devices: int, *, address: str | None, dashboard: bool) -> bool:
    """Join the cluster at `address`, or start a local one with `num_devices` devices. True if it was started here.

    Raises:
        ValueError: no cluster answers at `address`.
    """
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        _refuse_dead_address(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError) as error:
            raise ValueError(f"--ray-address {address}: no Ray cluster answers there ({error})") from error
        return False
    # Ray's workers, and the engines that are their children, would run at niceness 15: starved by anything else.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # It would also start a worker a core that nobody uses: actors have environments, and so processes, of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    resources: dict[str, Any] = {"resources": {CPU_DEVICE_RESOURCE: num_devices}} if device == "cpu" else {}
    ray.init(
        address="local",  # without it Ray joins whatever cluster this machine happens to run
        include_dashboard=dashboard,
        _node_ip_address=LOOPBACK,
        object_store_memory=_object_store_bytes(),
        configure_logging=True,
        **resources,
        **quiet,
    )
    return True


def _refuse_dead_address(address: str) -> None:
    """Ray itself retries a dead address for half a minute; one connection tells at once."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ValueError(f"--ray-address {address}: no Ray cluster answers there ({error})") from error


def _object_store_bytes() -> int:
    """A third of the memory, at most 8 GiB, no more than /dev/shm holds (else Ray falls back to slow disk files)."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        stats = os.statvfs("/dev/shm")
        shared = stats.f_bavail * stats.f_frsize
    except OSError:
        shared = memory
    return max(128 * 2**20, min(memory // 3, 8 * 2**30, int(shared * 0.6)))


def is_alone() -> bool:
    """Whether the cluster is one node: then servers bind to loopback."""
    return sum(node["Alive"] for node in ray.nodes()) == 1


def place_devices(device: str, num_devices: int, timeout_s: float) -> tuple[PlacementGroup, list[Bundle]]:
    """Reserve `num_devices` devices and say where each is, sorted by node and device.

    Raises:
        ValueError: the cluster has not that many devices, or they were not free within `timeout_s` seconds.
    """
    resource = "GPU" if device == "cuda" else CPU_DEVICE_RESOURCE
    total = int(ray.cluster_resources().get(resource, 0))
    if total < num_devices:
        hint = f"; start its nodes with --resources='{{\"{CPU_DEVICE_RESOURCE}\": N}}'" if device == "cpu" else ""
        raise ValueError(f"the plan needs {num_devices} devices ({resource}), the Ray cluster has {total}{hint}")
    group = placement_group([{resource: 1}] * num_devices, strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        free = int(ray.available_resources().get(resource, 0))
        raise ValueError(
            f"{num_devices} devices ({resource}) were not free within {timeout_s:.0f} s (--placement-timeout-s);"
            f" {free} of {total} are free"
        )
    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    ids = _probe_gpus(group, num_devices) if device == "cuda" else list(range(num_devices))
    order = sorted(range(num_devices), key=lambda i: (addresses[nodes[i]], nodes[i], ids[i]))
    return group, [Bundle(position, i, nodes[i], addresses[nodes[i]], ids[i]) for position, i in enumerate(order)]


def _probe_gpus(group: PlacementGroup, num_devices: int) -> list[int]:
    @ray.remote(num_cpus=0, num_gpus=1)
    def gpu_id() -> int:
        return int(ray.get_gpu_ids()[0])

    strategies = [PlacementGroupSchedulingStrategy(group, i) for i in range(num_devices)]
    return ray.get([gpu_id.options(scheduling_strategy=strategy).remote() for strategy in strategies])


def actor_on(
    cls: type, bundle: Bundle | None, group: PlacementGroup | None, *, env: dict[str, str], **options: Any
) -> Any:
    """A Ray actor class that runs on `bundle` (or on this node). It asks for no CPUs and no GPUs of its own.

    Devices are chosen by the plan, so Ray is told to leave CUDA_VISIBLE_DEVICES alone.
    """
    env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", **env}
    if bundle is not None and group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle.group_index)
    return ray.remote(cls).options(num_cpus=0, num_gpus=0, max_restarts=0, runtime_env={"env_vars": env}, **options)


def root_cause(error: BaseException) -> BaseException:
    """The error an actor's method raised, out of Ray's wrapping."""
    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, BaseException):
        return cause
    return error


def gather(refs: Sequence[Any], check: Callable[[], None] = lambda: None) -> list[Any]:
    """ray.get that raises at the first failure, wherever it stands: the others may be waiting for the failed one.

    `check` is called about once a second, and may raise to end the wait.
    """
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=1.0)
        ray.get(done)
        check()
    return ray.get(list(refs))
