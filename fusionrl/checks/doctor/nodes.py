"""Installed packages, and the nodes of a Ray cluster against each other: versions, folders, ways between them, clocks.

`NodeDoctor` looks at the node that it is on; the functions compare the answers. Nothing here knows Ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.base.environment import child_environment
from fusionrl.base.sockets import collective_interfaces
from fusionrl.base.wording import counted
from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.checks.doctor.machine import disk_findings, node_findings
from fusionrl.checks.outputs import temporary_folder
from fusionrl.plan.plan import Plan

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from fusionrl.base.group_stores import FileStore

_CONNECT_S = 3.0
_GROUP_S = 30.0
REDUCED_BYTES = 16 << 20
_CLOCK_S = 1.0


@dataclass(frozen=True)
class Order:
    """The question to each node."""

    plan: Plan | None  # None: flags are wrong, so a run's needs are unknown
    device: str  # "cpu" or "cuda"
    folders: Mapping[str, str] = field(default_factory=dict)  # flag → folder or file that must be seen on every node


@dataclass(frozen=True)
class NodeReport:
    """One node's answer.

    versions  of Python, packages and fusionrl's sources; packages that are not installed are not in it
    missing   flags whose folders it does not see
    findings  of its own limits
    """

    versions: Mapping[str, str]
    missing: Sequence[str]
    findings: Sequence[Finding]


class NodeDoctor:
    """Looks at the node that it is on."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._store: FileStore | TCPStore | None = None

    def look(self, order: Order) -> NodeReport:
        """Examine this node."""
        findings = [*node_findings(order.plan, order.device), *disk_findings(temporary_folder(), {})]
        missing = [flag for flag, folder in order.folders.items() if not Path(folder).exists()]
        return NodeReport(installed_versions(), missing, findings)

    def listen(self, address: str) -> int:
        """Accept connections at this node's address from now on; return the port."""
        self._server = socket.create_server((address, 0), backlog=1024)  # the kernel answers without an accept
        return int(self._server.getsockname()[1])

    def reach(self, places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Connect to each of other nodes: name → address and port. Return the name and error of those that fail."""

        def error_of(place: tuple[str, int]) -> str:
            try:
                socket.create_connection(place, _CONNECT_S).close()
                return ""
            except OSError as error:
                return str(error)

        with ThreadPoolExecutor(32) as threads:
            errors = dict(zip(places, threads.map(error_of, places.values()), strict=True))
        return {name: error for name, error in errors.items() if error}

    def now(self) -> float:
        return time.time()

    def prepare(self) -> str:
        """Import torch, as nodes wait for each other for less time than that may take; return its version."""
        import torch
        import torch.distributed

        return str(torch.__version__)

    def open_store(self, address: str, peers: Sequence[str]) -> int:
        """Open the store in which the nodes meet for an all-reduce, for these addresses alone; return its port."""
        from fusionrl.base.group_stores import create_group_store

        self._store = create_group_store(address, _GROUP_S, guests=peers)
        return self._store.port

    def all_reduce(self, rank: int, addresses: Sequence[str], port: int) -> float:
        """Add up tensors of all nodes, by the interface that a run takes; return the seconds that it took.

        addresses  of the nodes by rank; the store is at the first
        """
        import torch
        import torch.distributed as dist

        from fusionrl.base.group_stores import join_group_store

        os.environ.update(collective_interfaces(addresses[rank], os.environ))
        store = self._store if rank == 0 else join_group_store(addresses[0], port, _GROUP_S)
        limit = timedelta(seconds=_GROUP_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(addresses), timeout=limit)
        try:
            dist.barrier()
            values, start = torch.full((REDUCED_BYTES // 4,), rank + 1.0), time.perf_counter()
            dist.all_reduce(values)
            seconds = time.perf_counter() - start
        finally:
            dist.destroy_process_group()
        expected = len(addresses) * (len(addresses) + 1) / 2
        if not bool((values == expected).all()):
            raise RuntimeError(f"the sum is {values.unique()[:3].tolist()} and not {expected}")
        return seconds


def device_findings(devices: Mapping[str, int], plan: Plan | None) -> list[Finding]:
    """Compare the devices that Ray counts, by node, with those that the plan needs."""
    total = sum(devices.values())
    each = ", ".join(f"{name} has {n}" for name, n in devices.items())
    text = f"{counted(len(devices), 'node')}, {counted(total, 'device')}: {each}"
    if plan is not None and plan.num_bundles > total:
        cure = "start more nodes, give their number of devices (ray start --num-gpus, --resources), or plan with fewer"
        return [fault("nodes", f"{text}; the plan needs {plan.num_bundles}", cure)]
    return [fact("nodes", text)]


def look_findings(
    looks: Mapping[str, NodeReport | Exception], own_node: str, folders: Mapping[str, str]
) -> list[Finding]:
    """Compare what the nodes see. `own_node`: the node of this process, whose limits are examined already."""
    findings: list[Finding] = []
    seen: dict[str, NodeReport] = {}
    for name, look in looks.items():
        if isinstance(look, NodeReport):
            seen[name] = look
            continue
        cure = f"install the environment of this machine there, at the same place; `ray status` shows if {name} lives"
        findings.append(fault("nodes", f"node {name}: it cannot be examined ({look})", cure))
    findings += version_findings({name: look.versions for name, look in seen.items()}, own_node)
    for name, look in seen.items():
        for flag in look.missing:
            cure = f"put it on a disk that every node mounts at the same place, or copy it there ({flag})"
            findings.append(fault("shared", f"node {name} does not see {flag} {folders[flag]}", cure))
        if name != own_node:
            troubles = [finding for finding in look.findings if finding.status != "fact"]
            findings += [replace(finding, fact=f"node {name}: {finding.fact}") for finding in troubles]
    if seen and folders and not any(finding.check == "shared" for finding in findings):
        findings.append(fact("shared", f"all {len(seen)} nodes see {' and '.join(folders)}"))
    return findings


def reach_findings(failed: Mapping[str, Mapping[str, str] | Exception]) -> list[Finding]:
    """Report the ways between nodes that are closed: from → to → error."""
    findings = []
    cure = "open all TCP ports between the nodes, or choose another interface (ray start --node-ip-address)"
    for start, errors in failed.items():
        if isinstance(errors, Exception):
            findings.append(fault("reach", f"node {start}: it could not try to reach the others ({errors})", cure))
            continue
        for end, error in errors.items():
            findings.append(fault("reach", f"no connection from node {start} to node {end} ({error})", cure))
    return findings or [fact("reach", f"all {len(failed)} nodes reach each other by TCP")]


def prepare_findings(answers: Mapping[str, object]) -> list[Finding]:
    """Report the nodes that cannot import torch: node → its version, or the error."""
    cure = f"look with `fusionrl doctor` on that node why; where torch is broken, {CURE}"
    return [
        fault("collective", f"node {name}: torch is not imported ({answer})", cure)
        for name, answer in answers.items()
        if isinstance(answer, Exception)
    ]


def reduce_findings(answers: Mapping[str, float | Exception]) -> list[Finding]:
    """Report an all-reduce over all nodes: node → seconds, or its error."""
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if not errors:
        slowest = max(answer for answer in answers.values() if isinstance(answer, float))
        rate = REDUCED_BYTES / max(slowest, 1e-9) / 1e6
        text = f"an all-reduce of {REDUCED_BYTES >> 20} MiB over {len(answers)} nodes takes {slowest:.2f} s"
        return [fact("collective", f"{text} on the CPUs ({rate:.0f} MB/s)")]
    cure = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each node to the interface of its address; open all ports"
    fails = "an all-reduce over the nodes fails"
    return [fault("collective", f"node {name}: {fails} ({error})", cure) for name, error in errors.items()]


def clock_findings(offsets: Mapping[str, tuple[float, float] | Exception]) -> list[Finding]:
    """Report wall clocks that differ: other node → seconds ahead of this machine's, and how exactly that is known."""
    cure = "let every node keep its clock by NTP (chronyd, systemd-timesyncd)"
    harm = "times in logs do not compare, and tokens may expire"
    silent, wrong, clocks = [], [], {"this machine": (0.0, 0.0)}
    for name, offset in offsets.items():
        if isinstance(offset, Exception):
            text = f"node {name} does not tell its time ({offset})"
            silent.append(warning("clock", text, f"look with `ray status` if {name} lives, and examine again"))
            continue
        (ahead, error), clocks[name] = offset, offset
        if abs(ahead) > _CLOCK_S + error:
            text = f"the clock of node {name} is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
            wrong.append(warning("clock", f"{text}: {harm}", cure))
    first, last = max(clocks, key=lambda name: clocks[name][0]), min(clocks, key=lambda name: clocks[name][0])
    apart, error = clocks[first][0] - clocks[last][0], clocks[first][1] + clocks[last][1]
    if not wrong and apart > _CLOCK_S + error:  # one ahead of this machine, one behind, neither of them by much
        text = f"the clock of node {first} is {apart:.1f} s ahead of that of node {last}"
        wrong.append(warning("clock", f"{text}: {harm}", cure))
    return [*silent, *wrong] or [fact("clock", f"wall clocks of the nodes differ by {apart * 1e3:.0f} ms at most")]


_OPTIONAL = frozenset({"matplotlib", "sglang", "sglang-router", "nvidia-ml-py", "transformer-engine"})
_EXTRA = "gpu"  # names the engines' packages, which a CPU has, too
_MODULES = ("torch", "ray", "transformers", "megatron.core", "sglang", "sglang_router")
_IMPORT_LIMIT_S = 180.0
# One process a module: a broken library may end its process.
_IMPORT = """
import importlib, sys
from fusionrl.base import cpu_wing
cpu_wing.install_stand_ins()
importlib.import_module(sys.argv[1])
"""
_TORCH = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available()]))"


def package_findings(needs_engines: bool = True, requirements: Iterable[str] | None = None) -> list[Finding]:
    """Compare what is installed with `requirements`; None: those that fusionrl's own package names."""
    from packaging.requirements import Requirement

    try:
        named = list(metadata.requires("fusionrl") or []) if requirements is None else list(requirements)
    except metadata.PackageNotFoundError:
        cure = "install fusionrl (pip install -e .) into the environment that runs it"
        return [warning("packages", "fusionrl is not an installed package, so its requirements are not known", cure)]
    findings: list[Finding] = []
    versions = [f"python {platform.python_version()}"]
    for text in named:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", _EXTRA)):
            continue
        name = requirement.name
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            is_needed = name not in _OPTIONAL or (needs_engines and name.startswith("sglang"))
            if is_needed:
                cure = f"pip install '{name}{requirement.specifier}'"
                findings.append(fault("packages", f"{name} is not installed", cure))
            continue
        versions.append(f"{name} {version}")
        if requirement.specifier and not requirement.specifier.contains(version, prereleases=True):
            cure = f"install a version that was tested: pip install '{name}{requirement.specifier}'"
            findings.append(fault("packages", f"{name} is {version}, outside of {requirement.specifier}", cure))
    return findings or [fact("packages", ", ".join(versions))]


def torch_findings(device: str) -> list[Finding]:
    """Import torch in a process of its own: a broken build shows itself there. `device`: "cpu" or "cuda"."""
    ran = _python(_TORCH)
    if ran.returncode:
        text = f"it cannot be imported: {_last_line(ran.stderr)}"
        return [fault("torch", text, "install torch again: pip install torch")]
    version, cuda, has_cuda = json.loads(ran.stdout.splitlines()[-1])
    if device == "cuda" and not has_cuda:
        built = f"is built for CUDA {cuda}" if cuda else "is built without CUDA"
        cure = "install the build of torch for the driver's CUDA version (nvidia-smi), or use --device cpu"
        return [fault("torch", f"torch {version} {built} and finds no GPU, though the machine has one", cure)]
    return [fact("torch", f"torch {version}" + (f", CUDA {cuda}" if cuda else ", a CPU build"))]


def import_findings(modules: Iterable[str] = _MODULES) -> list[Finding]:
    """Import each module in a process of its own."""
    findings = []
    for module in modules:
        ran = _python(_IMPORT, module)
        if ran.returncode:
            cure = f"install {module.split('.')[0]} again, with the versions of requirements/"
            findings.append(fault("imports", f"{module} cannot be imported: {_last_line(ran.stderr)}", cure))
    return findings or [fact("imports", f"{', '.join(modules)} can be imported")]


def _python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *argv]
    try:
        env = child_environment("doctor")
        return subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False, env=env)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_IMPORT_LIMIT_S:.0f} s")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["its process ended without a word"])[-1][:300]


# Processes of different nodes send each other pickled objects of these, or compute together.
_PACKAGES = (
    *("fusionrl", "torch", "ray", "megatron-core", "sglang", "sglang-router", "transformers", "transformer-engine"),
)
_SOURCES = Path(__file__).parents[2]
_SHOWN = 12  # digits of a hash
CURE = "run `bash scripts/setup-env.sh` there, from the same checkout"


def installed_versions(sources: Path = _SOURCES) -> dict[str, str]:
    """Return the versions of Python and of the packages that nodes must have alike.

    That of fusionrl has a hash of its Python files, found below `sources`: two checkouts may have the same version.
    """
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(f"{path.relative_to(sources)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    versions["fusionrl"] = f"{versions.get('fusionrl', 'not installed')} (sources {digest.hexdigest()[:_SHOWN]})"
    return versions


def version_findings(versions: Mapping[str, Mapping[str, str]], own_node: str) -> list[Finding]:
    """Compare the versions of all nodes, by name, with those of `own_node`, where this process is."""
    if own_node not in versions:
        return []
    findings, here = [], versions[own_node]
    for name, there in versions.items():
        for package in sorted({*here, *there}):
            ours, theirs = (which.get(package, "not installed") for which in (here, there))
            if ours != theirs:
                findings.append(fault("versions", f"{package} is {ours} here and {theirs} on node {name}", CURE))
    return findings or [fact("versions", f"Python and {len(here) - 1} packages are the same on all nodes")]
