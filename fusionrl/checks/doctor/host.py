"""Limits of this machine: shared memory, open files, processes, memory, cores, disks.

Functions take `root`, below which /proc and /sys are read: "/" but in tests.
"""

import contextlib
import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fusionrl.base.memory_groups import kernel_number, limited_groups
from fusionrl.base.open_files import most_open_files
from fusionrl.base.spelling import existing_parent
from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.config.config import Config
from fusionrl.config.run_parts import changes_weights, saves
from fusionrl.models.adapters import num_adapter_parameters
from fusionrl.plan.adapters import adapter_folders, adapters_of
from fusionrl.plan.devices import GIB, host_memory
from fusionrl.plan.plan import Plan

ROOT = Path("/")
FEWEST_FILES, FEWEST_PROCESSES = 4096, 1024
SMALL_SHM, NO_SHM = 1 * GIB, 256 * 2**20
_FEWEST_FREE = 2 * GIB  # of a disk that a run writes to, whatever its size
_STATE_BYTES = 14  # of a parameter in a checkpoint: bf16 weights, fp32 weights and two moments
_STATE_BYTES_FP32 = 12


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


def disk_findings(folders: dict[str, Path], needed: Mapping[str, tuple[str, float]]) -> list[Finding]:
    """Compare the room of the disks of `folders` (flag → folder) with `needed` (flag → what is written, bytes)."""
    findings, warned = [], []
    for name, folder in folders.items():
        parent = folder if folder.is_dir() else existing_parent(folder)[0]
        if not os.access(parent, os.W_OK | os.X_OK):
            cure = f"make it writable, or name another folder ({name})"
            findings.append(fault("disk", f"{name} {folder}: this user may not write to {parent}", cure))
            continue
        try:
            free = float(shutil.disk_usage(parent).free)
        except OSError as error:
            findings.append(fault("disk", f"{name} {folder}: {error}", f"name another folder ({name})"))
            continue
        purpose, num_bytes = needed.get(name, ("", 0.0))
        takes = f"{purpose} take {num_bytes / GIB:.1f} GiB"
        if free < max(num_bytes, _FEWEST_FREE):
            is_large = num_bytes > _FEWEST_FREE
            least = f"and {takes}" if is_large else f"less than {_FEWEST_FREE / GIB:.0f}"
            cure = f"free some, or name a folder on another disk ({name})"
            cure += "; --keep-checkpoints N keeps the newest N" if is_large and name == "--run-dir" else ""
            findings.append(fault("disk", f"{name} {folder}: {free / GIB:.1f} GiB free, {least}", cure))
        else:
            more = f", {takes}" if num_bytes >= GIB / 20 else ""
            warned.append(f"{free / GIB:.0f} GiB free for {name} {folder}{more}")
    if warned:
        findings.append(fact("disk", "; ".join(warned)))
    return findings


def disk_findings_of_run(config: Config | None, plan: Plan | None) -> list[Finding]:
    """Compare the room for `runs/`, or the run's folders, with the checkpoints and weights that the run keeps there."""
    folder = Path(config.run.run_dir) if config is not None and config.run.run_dir else Path("runs")
    folders, needed = {"--run-dir": folder, "TMPDIR": temporary_folder()}, {}
    if config is not None and config.checkpoint.save_hf:
        folders["--save-hf"] = Path(config.checkpoint.save_hf).parent
    if config is not None and plan is not None:
        weights = float(_num_saved(config, plan) * (4 if plan.precision == "fp32" else 2))
        needed = {"--run-dir": ("checkpoints", checkpoint_bytes(config, plan)), "--save-hf": ("weights", weights)}
    return disk_findings(folders, needed)


def disk_warnings(config: Config, plan: Plan) -> list[str]:
    """Return a text, with its cure, for each disk that has too little room."""
    return [f"{each.fact}; {each.cure}" for each in disk_findings_of_run(config, plan) if each.status != "fact"]


def checkpoint_bytes(config: Config, plan: Plan) -> float:
    """Return the bytes of all checkpoints that the run keeps at once."""
    options = config.checkpoint
    if options.no_save or not saves(config) or not changes_weights(config):
        return 0.0
    num_saved = -(-plan.num_rollout // options.save_interval) if options.save_interval else 1
    if options.keep_checkpoints is not None:
        num_saved = min(num_saved, options.keep_checkpoints + 1)  # the newest is written before the oldest goes
    parameter = _STATE_BYTES_FP32 if plan.precision == "fp32" else _STATE_BYTES
    return float(max(num_saved, 1) * _num_saved(config, plan) * parameter)


def _num_saved(config: Config, plan: Plan) -> int:
    """Return the number of values that checkpoints and --save-hf have: of the model, or its adapters."""
    adapters = adapters_of(config, plan.shape)
    if adapters is None:
        return plan.shape.num_parameters
    return len(adapter_folders(config)) * num_adapter_parameters(plan.shape, adapters)


def temporary_folder() -> Path:
    """Return the folder in which Ray keeps its sockets and spills what does not fit into memory."""
    return Path(tempfile.gettempdir())
