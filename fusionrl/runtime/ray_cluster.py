"""Ray: start a local cluster or join one, and place devices (bundles) on it."""

import logging
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray
from ray._private import ray_constants
from ray._private.services import canonicalize_bootstrap_address
from ray.actor import ActorClass
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fusionrl.base.pending_calls import waiting
from fusionrl.base.sockets import LOOPBACK
from fusionrl.plan.devices import VARIABLE, Gpu, countable, locate
from fusionrl.runtime.early_start import CLUSTER_TOKEN
from fusionrl.runtime.ray_processes import only_what_is_used
from fusionrl.weights.remote_calls import Reference, get, wait

T = TypeVar("T")

# A CPU has no device that Ray counts: nodes carry this logical one instead, so that placement is the same code.
CPU_DEVICE_RESOURCE = "fusionrl_device"
LEAVE_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Environment of every actor: devices are chosen by the plan."""
_OPEN, _CLOSED = "this cluster is open", "this cluster asks for a token"
# Does the cluster answer a client without a token? A separate process, as Ray reads its mode once.
_PROBE = f"""
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"none", None, timeout=10)
    print({_OPEN!r})
except AuthenticationError:
    print({_CLOSED!r})
"""
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Bundle:
    """One device: where it is, and how to schedule on it."""

    index: int  # position in the sorted order that the plan counts by
    group_index: int  # index inside the placement group
    node_id: str
    node_address: str
    gpu: Gpu  # a running number on a CPU


def start_ray(
    device: str,
    num_devices: int,
    *,
    address: str | None,
    dashboard: bool,
    folder: Path | None = None,
    allow_open: bool = False,
) -> bool:
    """Join the cluster at `address`, or start a local one with `num_devices` devices. True if it was started here.

    A local one asks for a token made here, listens on loopback alone, and keeps its files in `folder`, which its user
    has made private. With `allow_open` it also joins a cluster that requires no token. Raises ValueError if no cluster
    answers at `address`, or one that is open or cannot be asked.
    """
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        _refuse_dead_address(address)
        try:
            ray.init(address=address if allow_open else _closed_cluster(address), **quiet)
        except (ConnectionError, RuntimeError) as error:
            raise ValueError(f"--ray-address {address}: no Ray cluster answers there ({error})") from error
        return False
    # Ray's workers, and the engines that are their children, would run at niceness 15: starved by anything else.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Any client of a cluster without a token can run code in it.
    _ask_for_token()
    # Ray takes a loopback address for a mistake, and listens on all addresses, unless clusters are disabled.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    # It would also start an unused worker for each core: actors have their own environments, and so processes.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    resources: dict[str, object] = {}
    if device == "cpu":
        resources["resources"] = {CPU_DEVICE_RESOURCE: num_devices}
    elif (count := countable(os.environ.get(VARIABLE))) is not None:
        resources["num_gpus"] = count  # Ray itself counts whole GPUs, of which there are fewer than MIG slices
    with only_what_is_used(dashboard):
        ray.init(
            address="local",  # without it Ray joins whatever cluster this machine happens to run
            include_dashboard=dashboard,
            _node_ip_address=LOOPBACK,
            object_store_memory=_object_store_bytes(),
            configure_logging=True,
            _temp_dir=None if folder is None else str(folder),
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


def _ask_for_token() -> None:
    """Let Ray's processes that start from here ask for this process's token, and this one show it."""
    from ray import _raylet

    raylet: types.ModuleType = _raylet  # compiled, without annotations
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": CLUSTER_TOKEN}
    raylet.Config.initialize("")  # it was read from the environment when ray was imported
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    assert raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN, "ray<2.52 asks for no token"


def _closed_cluster(address: str) -> str:
    """The `host:port` of the cluster at `address`, which has refused a client without a token. Raises ValueError if it
    accepts any client, is not a single running cluster, or cannot be probed."""
    resolved = _resolve_address(address)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environ["RAY_AUTH_MODE"] = "disabled"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE, resolved],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        answer, cause = probe.stdout, (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        answer, cause = "", f"no answer within {_PROBE_TIMEOUT_S:.0f} s"
    if _OPEN in answer:
        raise ValueError(
            f"--ray-address {address}: this cluster requires no token, so every client can run code as its"
            " user; start its nodes with RAY_AUTH_MODE=token and a RAY_AUTH_TOKEN, or pass --allow-open-ray if"
            " no one else can reach it"
        )
    if _CLOSED not in answer:
        raise ValueError(
            f"--ray-address {address}: {resolved} did not say whether it asks for a token ({cause[:300]});"
            " give the address (host:port) of a Ray cluster that answers"
        )
    return resolved


def _resolve_address(address: str) -> str:
    """`address` as host:port, by Ray's own rules: "auto" is RAY_ADDRESS, or the cluster of this machine."""
    cure = "give the address (host:port) of a Ray cluster that runs"
    try:
        resolved = canonicalize_bootstrap_address(address)
    except (ConnectionError, OSError, ValueError) as error:
        raise ValueError(f"--ray-address {address}: no Ray cluster is found by it ({error}); {cure}") from error
    if resolved is None or "://" in resolved:
        raise ValueError(f"--ray-address {address}: it cannot be asked whether it wants a token; {cure}")
    return resolved


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
    """Return whether the cluster is one node: then servers bind to loopback."""
    return sum(node["Alive"] for node in ray.nodes()) == 1


def place_devices(device: str, num_devices: int, timeout_s: float) -> tuple[PlacementGroup, list[Bundle]]:
    """Reserve `num_devices` devices and say where each is, sorted by node and device. Raises ValueError if the cluster
    has not that many devices, or they were not free within `timeout_s` seconds."""
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
    gpus = _probe_gpus(group, num_devices) if device == "cuda" else [Gpu(i, i) for i in range(num_devices)]
    order = sorted(range(num_devices), key=lambda i: (addresses[nodes[i]], nodes[i], gpus[i].position))
    return group, [Bundle(position, i, nodes[i], addresses[nodes[i]], gpus[i]) for position, i in enumerate(order)]


def _probe_gpus(group: PlacementGroup, num_devices: int) -> list[Gpu]:
    """Ask on each bundle's node for the GPU that Ray has given to it, and for the list that it is named by."""

    @ray.remote(num_cpus=0, num_gpus=1, runtime_env={"env_vars": LEAVE_DEVICES})
    def facts() -> tuple[str | None, str]:
        return os.environ.get(VARIABLE), str(ray.get_gpu_ids()[0])

    strategies = [PlacementGroupSchedulingStrategy(group, i) for i in range(num_devices)]
    answers = ray.get([facts.options(scheduling_strategy=strategy).remote() for strategy in strategies])
    return [locate(value, name) for value, name in answers]


def actor_on(
    cls: type,
    bundle: Bundle | None,
    group: PlacementGroup | None,
    *,
    env: dict[str, str] | None,
    nsys: Mapping[str, str] | None = None,
    **options: object,
) -> ActorClass:
    """A Ray actor class that runs on `bundle` (or on this node). It asks for no CPUs and no GPUs of its own.

    Devices are chosen by the plan, so Ray leaves CUDA_VISIBLE_DEVICES alone: it is the node's own list, or a MIG slice
    (`plan/visible_devices.py`). With `env` None, on a CPU, the process has the environment in which Ray was started; an
    environment of its own would start Ray's agent first, and the process twice. `nsys`: options of the profiler that
    it runs under.
    """
    if env is not None:
        variables = {**LEAVE_DEVICES, **env, **(bundle.gpu.environment if bundle is not None else {})}
        options["runtime_env"] = {"env_vars": variables} | ({} if nsys is None else {"nsight": dict(nsys)})
    if bundle is not None and group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle.group_index)
    return ray.remote(cls).options(num_cpus=0, num_gpus=0, max_restarts=0, **options)


FAILURES = (RuntimeError, OSError, ray.exceptions.RayError)
"""Errors that may be the consequence of a process that died."""


def is_running() -> bool:
    return bool(ray.is_initialized())


def root_cause(error: BaseException) -> BaseException:
    """Return the error that an actor's method raised, without its Ray wrapper."""
    cause = getattr(error, "cause", None)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, BaseException):
        return cause
    return error


def gather(refs: Sequence[Reference[T]], check: Callable[[], None] = lambda: None, interval_s: float = 1.0) -> list[T]:
    """ray.get that raises at the first failure, wherever it stands: the others may be waiting for the failed one.

    `check` is called about once in `interval_s` seconds while calls are under way, and may raise to end the wait.
    """
    pending = list(refs)
    with waiting(lambda: pending):
        while pending:
            done, pending = wait(pending, num_returns=1, timeout=interval_s)
            get(done)
            if pending:
                check()
    return get(list(refs))
