"""Ray: start a local cluster or join one, place devices (bundles) on it, and put an object on each of its nodes.

`only_what_is_used` leaves out the processes of a local cluster that no run needs.
"""

import logging
import os
import socket
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import psutil
import ray
from ray import _raylet as raylet
from ray._private import ray_constants, services, workers
from ray._private.node import Node as RayNode
from ray._private.services import canonicalize_bootstrap_address
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fusionrl.base.sockets import LOOPBACK
from fusionrl.plan.devices import VARIABLE, Gpu, countable, locate
from fusionrl.runtime.early_start import CLUSTER_TOKEN

logger = logging.getLogger(__name__)
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
    if not dashboard:  # nothing else shows the record of all calls, which grows by 50 MiB in 1,000 steps
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
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


def has_raylet() -> bool:
    """Return whether Ray can start actors on this machine: an actor for a node whose raylet has died waits for ever."""
    if not ray.is_initialized():  # a run in one process
        return True
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and node["Alive"] for node in ray.nodes())


def is_alone() -> bool:
    """Return whether the cluster is one node: then servers bind to loopback."""
    return sum(node["Alive"] for node in ray.nodes()) == 1


def place_devices(
    device: str, num_devices: int, timeout_s: float, *, may_come_back: bool = False
) -> tuple[PlacementGroup, list[Bundle]]:
    """Reserve `num_devices` devices and say where each is, sorted by node and device. Raises ValueError if the cluster
    has not that many devices, or they were not free within `timeout_s` seconds. With `may_come_back` the cluster had
    them: a node that is lost has as long to come back, and the error is a RuntimeError."""
    resource = "GPU" if device == "cuda" else CPU_DEVICE_RESOURCE
    deadline, is_told = time.monotonic() + timeout_s, False
    kind = RuntimeError if may_come_back else ValueError
    while (total := int(ray.cluster_resources().get(resource, 0))) < num_devices:
        if may_come_back and (left_s := deadline - time.monotonic()) > 0:
            if not is_told:
                logger.warning("the cluster has %d of %d devices; waiting up to %.0f s", total, num_devices, left_s)
            is_told = True
            time.sleep(1.0)
            continue
        hint = f"; start its nodes with --resources='{{\"{CPU_DEVICE_RESOURCE}\": N}}'" if device == "cpu" else ""
        raise kind(f"the plan needs {num_devices} devices ({resource}), the Ray cluster has {total}{hint}")
    group = placement_group([{resource: 1}] * num_devices, strategy="PACK")
    if not group.wait(max(1.0, deadline - time.monotonic())):
        remove_placement_group(group)
        free = int(ray.available_resources().get(resource, 0))
        raise kind(
            f"{num_devices} devices ({resource}) were not free within {timeout_s:.0f} s (--placement-timeout-s);"
            f" {free} of {total} are free"
        )
    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    gpus = _probe_gpus(group, range(num_devices)) if device == "cuda" else [Gpu(i, i) for i in range(num_devices)]
    order = sorted(range(num_devices), key=lambda i: (addresses[nodes[i]], nodes[i], gpus[i].position))
    return group, [Bundle(position, i, nodes[i], addresses[nodes[i]], gpus[i]) for position, i in enumerate(order)]


def places_now(device: str, group: PlacementGroup, bundles: Sequence[Bundle]) -> list[Bundle]:
    """Return the bundles where they are now: in place of a node that is gone, Ray reserves devices of another that has
    some free. One without a node, or whose node starts nothing, stays as it was."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    found = list(bundles)
    for number, bundle in enumerate(bundles):
        node = nodes.get(bundle.group_index)
        if node != bundle.node_id and node in addresses:
            try:
                gpu = _probe_gpus(group, [bundle.group_index], _ANSWER_S)[0] if device == "cuda" else bundle.gpu
            except (ray.exceptions.GetTimeoutError, ray.exceptions.NodeDiedError) as error:
                logger.warning("a node that was to replace one does not start a process: %s", error)
                continue
            found[number] = replace(bundle, node_id=node, node_address=addresses[node], gpu=gpu)
    return found


def devices_gone(bundles: Sequence[Bundle]) -> set[int]:
    """Return the numbers of devices whose node is dead."""
    living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return {bundle.index for bundle in bundles if bundle.node_id not in living}


def _probe_gpus(group: PlacementGroup, numbers: Iterable[int], timeout_s: float | None = None) -> list[Gpu]:
    """Ask on each bundle's node for the GPU that Ray has given to it, and for the list that it is named by."""

    @ray.remote(num_cpus=0, num_gpus=1, runtime_env={"env_vars": LEAVE_DEVICES})
    def facts() -> tuple[str | None, str]:
        return os.environ.get(VARIABLE), str(ray.get_gpu_ids()[0])

    strategies = [PlacementGroupSchedulingStrategy(group, number) for number in numbers]
    calls = [facts.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    answers = ray.get(calls, timeout=timeout_s)
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
    (`plan/devices.py`). With `env` None, on a CPU, the process has the environment in which Ray was started; an
    environment of its own would start Ray's agent first, and the process twice. `nsys`: options of the profiler that
    it runs under.
    """
    if env is not None:
        variables = {**LEAVE_DEVICES, **env, **(bundle.gpu.environment if bundle is not None else {})}
        options["runtime_env"] = {"env_vars": variables} | ({} if nsys is None else {"nsight": dict(nsys)})
    if bundle is not None and group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle.group_index)
    elif bundle is None:
        own_node = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(own_node, soft=True)
    return ray.remote(cls).options(num_cpus=0, num_gpus=0, max_restarts=0, **options)


_raylet: types.ModuleType = raylet  # compiled, without annotations
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Starters of the autoscaler, of what prints actors' output in the driver, and of the dashboard's server."""
_DASHBOARD_AGENT, _RUNTIME_ENV_AGENT = "--dashboard_agent_command", "--runtime_env_agent_command"
_PROGRAM = ("-I", "-S", str(Path(__file__).with_name("ray_programs.py")))
_SLEEPER = (sys.executable, *_PROGRAM, "agent")
_WORKER, _WORKER_PROGRAM = "--python_worker_command", str(Path(workers.__path__[0], "default_worker.py"))
_STARTER = (*_PROGRAM, "worker")
_SETUP_PROGRAM, _SETUP = "setup_worker.py", str(Path(__file__).with_name("ray_setup_worker.py"))
_AGENT_PORTS = (
    _raylet.METRICS_AGENT_PORT_NAME,
    _raylet.METRICS_EXPORT_PORT_NAME,
    _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
)
_NO_PORT = -1  # what Ray's own agent says where the packages of a dashboard are not installed


@contextmanager
def only_what_is_used(dashboard: bool) -> Iterator[None]:
    """Start Ray within it: in process groups of its own, and without the processes that a run does not use.

    `timeout`, a shell or a scheduler sends SIGTERM to the command's whole group. The command then ends Ray; if
    Ray were dead by then, each of the command's calls would wait for a minute.

    The cluster has one node and actors write their own logs, so without a dashboard three of its processes, and two
    agents of a raylet, cost 4 s of a core for nothing. Ray has no options for it. One agent makes the environments of
    `runtime_env`; the run's actors have none, and for a user's function a sleeper listens and becomes that agent.
    """
    popen, start_raylet = services.ConsolePopen, RayNode.start_raylet

    def start(command: Sequence[str], *args: object, **options: object) -> subprocess.Popen[bytes]:
        command = [_sleeper(word, dashboard) for word in command]
        return popen(command, *args, process_group=0, **options)

    def start_without_ports(node: RayNode, *args: object, **options: object) -> None:
        for name in _AGENT_PORTS:
            _raylet.persist_port(node.get_session_dir_path(), node._node_id, name, _NO_PORT)
        start_raylet(node, *args, **options)

    unused: dict[str, Callable[..., None]] = {}
    if not dashboard:
        unused = {name: lambda node, **options: None for name in _UNUSED if hasattr(RayNode, name)}
        unused["start_raylet"] = start_without_ports
    originals = {name: getattr(RayNode, name) for name in unused}
    services.ConsolePopen = start
    for name, function in unused.items():
        setattr(RayNode, name, function)
    try:
        yield
    finally:
        services.ConsolePopen = popen
        for name, function in originals.items():
            setattr(RayNode, name, function)


def _sleeper(word: str, dashboard: bool) -> str:
    """Return a word of a raylet's command, with a sleeper for an agent, and workers that may be forks."""
    flag, _, program = word.partition("=")
    if flag == _WORKER:  # with an environment of its own, a worker is started by the second program
        word = word.replace(str(Path(_WORKER_PROGRAM).with_name(_SETUP_PROGRAM)), _SETUP)
        return word.replace(_WORKER_PROGRAM, f"{subprocess.list2cmdline(_STARTER)} {_WORKER_PROGRAM}")
    if flag == _RUNTIME_ENV_AGENT:
        return f"{flag}={subprocess.list2cmdline([*_SLEEPER, _raylet.RUNTIME_ENV_AGENT_PORT_NAME])} {program}"
    if flag == _DASHBOARD_AGENT and not dashboard:
        return f"{flag}={subprocess.list2cmdline(_SLEEPER)}"
    return word


_ANSWER_S = 120.0  # a node's first worker starts Python and imports packages, maybe from a slow disk


_END_S = 20.0


def end_processes(pids: Iterable[int]) -> None:
    """Kill processes of this machine and their children, also stopped ones, and wait until they are gone."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            processes += [process, *process.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_S)


def end_on_nodes(processes: Mapping[str, Sequence[int]]) -> None:
    """The same of processes on any node: node → process ids. A node that does not answer is left alone."""
    own_node = ray.get_runtime_context().get_node_id()
    task = ray.remote(num_cpus=0, num_gpus=0, max_retries=0)(end_processes)
    elsewhere = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(pids)
        for node, pids in processes.items()
        if node != own_node
    ]
    end_processes(processes.get(own_node, ()))
    if elsewhere:
        ray.wait(elsewhere, num_returns=len(elsewhere), timeout=_END_S)


@dataclass(frozen=True)
class Node:
    """A node of a cluster."""

    name: str  # its address, and with the start of its Ray id where several nodes share an address
    address: str
    is_own: bool  # this process is on it
    num_devices: int  # that Ray counts


class NodeActors:
    """A context manager: joins the cluster and puts an object on each node; leaving it ends them and leaves."""

    def __init__(self, kind: type, device: str, address: str, *, allow_open: bool) -> None:
        """`kind`: the objects' class, made without arguments; the others as of `start_ray`."""
        self._kind, self._device, self._address, self._allow_open = kind, device, address, allow_open
        self.nodes: list[Node] = []
        """The nodes that `ask` calls; callers may remove those that do not answer."""
        self._handles: dict[str, ActorHandle] = {}

    def __enter__(self) -> Self:
        """Raise ValueError if the cluster cannot be joined."""
        start_ray(self._device, 0, address=self._address, dashboard=False, allow_open=self._allow_open)
        try:
            self._spread()
        except BaseException:
            ray.shutdown()
            raise
        return self

    def _spread(self) -> None:
        living = [node for node in ray.nodes() if node["Alive"]]
        shared = Counter(node["NodeManagerAddress"] for node in living)
        own_node = ray.get_runtime_context().get_node_id()
        resource = "GPU" if self._device == "cuda" else CPU_DEVICE_RESOURCE
        for node in sorted(living, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
            identity, address = node["NodeID"], node["NodeManagerAddress"]
            name = address if shared[address] == 1 else f"{address} ({identity[:6]})"
            self.nodes.append(Node(name, address, identity == own_node, int(node["Resources"].get(resource, 0))))
            place = NodeAffinitySchedulingStrategy(identity, soft=False)
            options = {"num_cpus": 0, "num_gpus": 0, "max_restarts": 0, "scheduling_strategy": place}
            self._handles[name] = ray.remote(self._kind).options(**options).remote()

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def ask(self, method: str, *arguments: object) -> Mapping[str, object]:
        """Call a method on all of `nodes` at once; name → answer, or the error in its place."""
        return self.ask_each(method, dict.fromkeys([node.name for node in self.nodes], arguments))

    def ask_each(self, method: str, arguments: Mapping[str, Sequence[object]]) -> Mapping[str, object]:
        """Call a method on some nodes at once: name → its arguments; name → answer, or the error in its place."""
        calls = {name: getattr(self._handles[name], method).remote(*values) for name, values in arguments.items()}
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
        return {name: _answer(reference) for name, reference in calls.items()}


def _answer(reference: ray.ObjectRef) -> object:
    try:
        return ray.get(reference, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return TimeoutError(f"no answer within {_ANSWER_S:.0f} s")
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return RuntimeError(lines[-1].strip())
