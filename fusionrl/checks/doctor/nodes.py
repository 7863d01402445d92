"""The nodes of a Ray cluster against each other: versions, folders, ways between them, clocks, and each one's limits.

`NodeDoctor` looks at the node that it is on; the functions compare the answers. Nothing here knows Ray.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.base.network_interfaces import collective_interfaces
from fusionrl.base.wording import counted
from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.checks.doctor.gpus import gpu_findings
from fusionrl.checks.doctor.host import (
    core_findings,
    disk_findings,
    limit_findings,
    memory_findings,
    shared_memory_findings,
    temporary_folder,
)
from fusionrl.checks.doctor.network import network_findings
from fusionrl.checks.doctor.packages import CURE, installed_versions, version_findings
from fusionrl.plan.plan import Plan

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from fusionrl.base.torch_stores import FileStore

_CONNECT_S = 3.0
_GROUP_S = 30.0
REDUCED_BYTES = 16 << 20
_CLOCK_S = 1.0


@dataclass(frozen=True)
class Order:
    """The question to each node.

    plan     None: flags are wrong, so a run's needs are unknown
    device   "cpu" or "cuda"
    folders  flag → folder or file that must be seen on every node
    """

    plan: Plan | None
    device: str
    folders: Mapping[str, str] = field(default_factory=dict)


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
        findings = [*shared_memory_findings(), *limit_findings(), *memory_findings(order.plan), *core_findings(0)]
        findings += [*network_findings(), *disk_findings({"TMPDIR": temporary_folder()}, {})]
        if order.device == "cuda":
            findings += gpu_findings()
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
        from fusionrl.base.torch_stores import create_group_store

        self._store = create_group_store(address, _GROUP_S, guests=peers)
        return self._store.port

    def all_reduce(self, rank: int, addresses: Sequence[str], port: int) -> float:
        """Add up tensors of all nodes, by the interface that a run takes; return the seconds that it took.

        addresses  of the nodes by rank; the store is at the first
        """
        import torch
        import torch.distributed as dist

        from fusionrl.base.torch_stores import join_group_store

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
