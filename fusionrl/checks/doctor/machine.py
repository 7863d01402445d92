"""Limits of this machine: shared memory, open files, processes, memory, cores, disks, GPUs by NVML, network names.

Functions take `root`, below which /proc and /sys are read: "/" but in tests.
"""

import contextlib
import os
import resource
import shutil
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from fusionrl.base.environment import hide_passwords
from fusionrl.base.memory_groups import kernel_number, limited_groups
from fusionrl.base.process import most_open_files
from fusionrl.base.sockets import GLOO, NCCL
from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.checks.outputs import disk_report
from fusionrl.observe.hardware import Device, Nvml, ask
from fusionrl.plan.devices import GIB, VARIABLE, host_memory, visible_names
from fusionrl.plan.plan import Plan

ROOT = Path("/")
FEWEST_FILES, FEWEST_PROCESSES = 4096, 1024
SMALL_SHM, NO_SHM = 1 * GIB, 256 * 2**20


def node_findings(plan: Plan | None, device: str, num_processes: int = 0) -> list[Finding]:
    """Look at all of these but the disks. `num_processes`: those of a run that are busy here."""
    return [
        *(gpu_findings() if device == "cuda" else []),
        *shared_memory_findings(),
        *limit_findings(),
        *memory_findings(plan),
        *core_findings(num_processes),
        *network_findings(),
    ]


def shared_memory_findings(folder: Path = ROOT / "dev/shm") -> list[Finding]:
    """Look at /dev/shm, where Ray keeps rollouts and where weights go to engines."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return [fault("shm", f"{folder} is not there", "mount it: a container gets it by --shm-size=16g")]
    text = f"{folder} has {free / GIB:.1f} GiB free"
    cure = "give the container more: docker run --shm-size=16g, or an emptyDir of medium Memory"
    if free < NO_SHM:
        return [fault("shm", f"{text}: Ray's object store does not fit", cure)]
    if free < SMALL_SHM:
        return [warning("shm", f"{text}: rollouts of a large run do not fit, and Ray goes to slow files", cure)]
    return [fact("shm", text)]


def limit_findings(root: Path = ROOT) -> list[Finding]:
    """Look at the limits of open files and of processes, by ulimit and by control group."""
    files = most_open_files()
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    limits = {"ulimit -u": None if most == resource.RLIM_INFINITY else float(most)}
    for name in ("sys/fs/cgroup/pids.max", "sys/fs/cgroup/pids/pids.max"):
        limits[f"/{name}"] = kernel_number(root / name)
    findings = []
    if files < FEWEST_FILES:
        cure = "raise the hard limit: ulimit -Hn 65536 before the shell starts, or docker run --ulimit nofile=65536"
        findings.append(fault("files", f"a process may open {files} files; Ray and the router need thousands", cure))
    least, where = min(((value, name) for name, value in limits.items() if value is not None), default=(None, ""))
    if least is not None and least < FEWEST_PROCESSES:
        cure = "raise it: ulimit -u 65536, or docker run --pids-limit=-1"
        text = f"{least:.0f} processes and threads are allowed ({where}); Ray and the engines start hundreds"
        findings.append(fault("processes", text, cure))
    processes = "any number of" if least is None else f"{least:.0f}"
    return findings or [fact("limits", f"{files} open files, {processes} processes")]


def memory_findings(plan: Plan | None, root: Path = ROOT) -> list[Finding]:
    """Compare the memory that is free, in this machine and its control group, with what the plan needs of a node."""
    total, free = host_memory(root), free_memory(root)
    if total is None or free is None:
        return [fact("memory", "the memory of this machine cannot be read")]
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of host memory are free"
    bars = plan.memory.host_bars if plan is not None and plan.memory is not None else ()
    if bars:
        worst = max(bars, key=lambda bar: bar.total)
        if worst.total > free:
            cure = "end what else runs here, raise the container's memory, or take what `fusionrl plan` proposes"
            return [fault("memory", f"{text}, and the run takes {worst.total / GIB:.1f} ({worst.name})", cure)]
        text += f"; the run takes {worst.total / GIB:.1f}"
    return [fact("memory", text)]


def free_memory(root: Path = ROOT) -> float | None:
    """Return the bytes that new processes may take: of the machine, or fewer by a control group."""
    sizes: list[float] = []
    with contextlib.suppress(OSError):  # no Linux
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                sizes.append(float(line.split()[1]) * 1024)
    sizes += [group.limit - group.used for group in limited_groups(root)]
    return min(sizes, default=None)


def core_findings(num_processes: int, root: Path = ROOT) -> list[Finding]:
    """Compare the cores that a control group allows with those that programs see."""
    seen = len(os.sched_getaffinity(0))
    quota = _quota(root)
    if quota is not None and quota < seen * 0.75:
        cure = f"give the container more CPU, or show it its share: taskset -c 0-{max(int(quota) - 1, 0)}"
        text = f"programs see {seen} cores and may use {quota:g}: their threads wait for each other"
        return [warning("cores", text, cure)]
    return [fact("cores", f"{seen} cores" + (f" for {num_processes} busy processes" if num_processes else ""))]


def _quota(root: Path) -> float | None:
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()[:2]
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        quota_us = kernel_number(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period_us = kernel_number(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
        return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def disk_findings(folders: Mapping[str, Path], needed: Mapping[str, tuple[str, float]]) -> list[Finding]:
    """Report the disks of `folders`, as `disk_report` compares them."""
    problems, facts = disk_report(folders, needed)
    return [*(fault("disk", *problem) for problem in problems), *([fact("disk", "; ".join(facts))] if facts else [])]


_CHECK = "gpu"
_BUSY = 1 * GIB  # of memory in use before a run starts


def gpu_findings() -> list[Finding]:
    """Look at each GPU that CUDA_VISIBLE_DEVICES leaves visible; only called where the run uses them."""
    try:
        import pynvml
    except ImportError:
        return [warning(_CHECK, "nvidia-ml-py is not installed, so GPUs are not looked at", "pip install nvidia-ml-py")]
    try:
        pynvml.nvmlInit()
        try:
            return _all_findings(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return [fault(_CHECK, f"NVML: {error}", "look at nvidia-smi: the driver does not answer")]


def _all_findings(pynvml: ModuleType) -> list[Finding]:
    try:
        visible = visible_names(os.environ.get(VARIABLE))
    except ValueError as error:
        text, _, cure = str(error).rpartition("; ")
        return [fault(_CHECK, text, cure)]
    nvml, findings, kinds = Nvml(pynvml), [], []
    for name in [str(index) for index in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible:
        try:
            device = nvml.device(name)
        except pynvml.NVMLError as error:
            cure = f"look at nvidia-smi, and at {VARIABLE}, where it is set"
            findings.append(fault(_CHECK, f"GPU {name}: NVML does not find it ({error})", cure))
            continue
        kinds.append(str(device.inventory()["name"] or "a GPU without a name"))
        findings += _device_findings(device, f"GPU {name} ({kinds[-1]})")
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    cuda = ask(pynvml, pynvml.nvmlSystemGetCudaDriverVersion)
    version = "" if cuda is None else f" for CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    return [fact(_CHECK, f"{counted or 'no GPU'}; driver {nvml.driver or 'unknown'}{version}"), *findings]


def _device_findings(device: Device, name: str) -> list[Finding]:
    findings, reading, total = [], device.reading(), device.inventory()["memory_bytes"]
    other_pids = [pid for pid in device.process_ids() if pid != os.getpid()]
    used_bytes = reading.memory_used_bytes
    if other_pids or (used_bytes or 0) > _BUSY:
        who = f"processes {', '.join(map(str, other_pids))}" if other_pids else "a process unseen from here"
        of_total = f" of {total / GIB:.1f}" if isinstance(total, int) else ""
        used = f"{used_bytes / GIB:.1f}{of_total} GiB are" if used_bytes else "it is"
        text = f"{name}: {used} in use by {who}"
        cure = "end what is left of an earlier run (nvidia-smi shows it), or choose other GPUs: CUDA_VISIBLE_DEVICES"
        findings.append(warning(_CHECK, text, cure))
    if reading.ecc_errors:
        text = f"{name}: {reading.ecc_errors} uncorrected memory errors since the driver was loaded"
        cure = "reset the GPU (nvidia-smi -r, as root) or the machine; replace the card if they come back"
        findings.append(fault(_CHECK, text, cure))
    if hot := [reason for reason in reading.slowed_by if "thermal" in reason or reason == "power brake"]:
        cure = "look at cooling and power; one slow GPU makes all ranks wait"
        findings.append(warning(_CHECK, f"{name}: its clock is held down now ({', '.join(hot)})", cure))
    return findings


_CONNECT_S = 3.0
_LOCAL = "127.0.0.1"


def network_findings(environ: Mapping[str, str] = os.environ, host: str | None = None) -> list[Finding]:
    """Check this machine's name, the interfaces that variables name, and proxies. `host`: None means its own name."""
    return [*_name_findings(host or socket.gethostname()), *_interface_findings(environ), *_proxy_findings(environ)]


def _name_findings(host: str) -> list[Finding]:
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        cure = f"add a line '127.0.0.1 {host}' to /etc/hosts, or set the host name to one that resolves"
        return [fault("host", f"the host name {host} does not resolve ({error}); torch and Ray look it up", cure)]
    try:
        with socket.create_server((_LOCAL, 0)) as server, socket.create_connection(server.getsockname(), _CONNECT_S):
            pass
    except OSError as error:
        cure = "bring the interface lo up (ip link set lo up), and let the firewall pass 127.0.0.1"
        return [fault("host", f"no connection over {_LOCAL}: {error}", cure)]
    return [fact("host", f"{host} is {address}")]


def _interface_findings(environ: Mapping[str, str]) -> list[Finding]:
    import psutil

    there = sorted(psutil.net_if_addrs())
    findings = []
    for variable in (GLOO, NCCL):
        value = environ.get(variable)
        if not value or value.startswith("^"):  # NCCL: all but these
            continue
        names = value.removeprefix("=").split(",")
        is_prefix = variable == NCCL and not value.startswith("=")
        missing = [n for n in names if not any(t == n or (is_prefix and t.startswith(n)) for t in there)]
        if missing:
            cure = f"unset {variable}, as fusionrl chooses an interface itself, or name one of {', '.join(there)}"
            text = f"{variable}={value}: this machine has no interface {', '.join(missing)}"
            findings.append(fault("interface", text, cure))
    return findings


def _proxy_findings(environ: Mapping[str, str]) -> list[Finding]:
    variables = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)]
    if not variables:
        return []
    proxies = {"no": environ.get("no_proxy") or environ.get("NO_PROXY") or ""}
    if urllib.request.proxy_bypass_environment(_LOCAL, proxies):  # type: ignore[attr-defined]  # typeshed lacks it
        return []
    cure = "export no_proxy=127.0.0.1,localhost, with the addresses of all nodes"
    return [warning("proxy", f"{variables[0]} is set, and no_proxy does not name {_LOCAL}, where engines are", cure)]


def address_findings(check: str, flag: str, address: str) -> list[Finding]:
    """Connect to a server that a flag names, as host:port or as a URL."""
    displayed = f"{flag} {hide_passwords(address)}"
    try:
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        cure = "write host:port or http://host:port/path, with a port of 1 to 65535"
        return [fault(check, f"{displayed}: no address ({error})", cure)]
    try:
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except OSError as error:
        cure = "start the server, or correct the address; a firewall between the machines may drop it, too"
        return [fault(check, f"{displayed}: no connection ({error})", cure)]
    return [fact(check, f"{displayed} answers")]
