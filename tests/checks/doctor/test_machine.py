"""`fusionrl doctor` on a machine: each fault that is planted is found, with its cure."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fusionrl.checks.doctor import examine, machine
from fusionrl.checks.doctor.findings import Finding, fact, fault, has_fault, summary, warning
from fusionrl.checks.doctor.machine import address_findings, gpu_findings, network_findings
from fusionrl.checks.doctor.nodes import import_findings, package_findings, torch_findings
from fusionrl.plan.devices import GIB

Tree = Callable[..., Path]


def one(findings: list[Finding], status: str = "fault") -> Finding:
    """The only finding with a status, which has a cure."""
    (finding,) = [finding for finding in findings if finding.status == status]
    assert finding.cure
    return finding


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """tree(path=text, …) -> a root with such files, as /proc and /sys have them."""

    def make(files: dict[str, object]) -> Path:
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path / "root"

    return make


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages come before all others, here and in children."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[3]}")
    return folder


def test_packages_of_a_wrong_version_and_missing_ones(on_path: Path) -> None:
    info = on_path / "numpy-1.26.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.0\n")
    found = one(package_findings(requirements=["numpy>=2.0", "psutil>=5.9"]))
    assert found.fact == "numpy is 1.26.0, outside of >=2.0" and "pip install 'numpy>=2.0'" in found.cure
    assert "no-such-thing is not installed" in one(package_findings(requirements=["no-such-thing>=1"])).fact
    assert "sglang is" in one(package_findings(requirements=["sglang>=99; extra == 'gpu'"])).fact
    assert not has_fault(package_findings(requirements=["transformer-engine>=2.9; extra == 'gpu'"]))
    assert not has_fault(package_findings(requirements=["hypothesis>=999; extra == 'dev'"])), "not needed by a run"


def test_a_torch_that_is_broken_or_without_cuda_on_a_machine_with_a_gpu(on_path: Path) -> None:
    (on_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    assert "libcudart.so.13" in one(torch_findings("cpu")).fact
    lines = "__version__ = '2.13'\nclass version: cuda = None\nclass cuda: is_available = staticmethod(lambda: False)\n"
    (on_path / "torch.py").write_text(lines)
    assert "built without CUDA and finds no GPU" in one(torch_findings("cuda")).fact
    assert not has_fault(torch_findings("cpu"))
    # With --deep, a module that cannot be imported.
    (on_path / "ray.py").write_text("import no_such_part_of_ray\n")
    assert "No module named 'no_such_part_of_ray'" in one(import_findings(["ray"])).fact


def test_shared_memory_that_is_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "not there" in one(machine.shared_memory_findings(tmp_path / "none")).fact
    usage = SimpleNamespace(free=64 * 2**20)  # Docker's default
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    assert "--shm-size" in one(machine.shared_memory_findings()).cure
    usage.free = 512 * 2**20
    assert one(machine.shared_memory_findings(), "warning")


def test_too_few_open_files_and_processes(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    found = one(machine.limit_findings(tree({"sys/fs/cgroup/pids.max": 100})))
    assert "100 processes" in found.fact and "--pids-limit" in found.cure
    assert not has_fault(machine.limit_findings(tree({"sys/fs/cgroup/pids.max": "max"})))
    monkeypatch.setattr(machine, "most_open_files", lambda: 256)
    assert "a process may open 256 files" in one(machine.limit_findings()).fact


def _plan(gigabytes: float) -> SimpleNamespace:
    return SimpleNamespace(memory=SimpleNamespace(host_bars=(SimpleNamespace(name="training", total=gigabytes * GIB),)))


@pytest.mark.parametrize(
    "names", [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
)
def test_host_memory_over_its_cgroup(tree: Tree, names: tuple[str, str]) -> None:
    """The machine has 64 GiB free, the container 2 of its 8: a run of 4 would be killed."""
    most, used = (f"sys/fs/cgroup/{name}" for name in names)
    stat = f"{most.rpartition('/')[0]}/memory.stat"
    root = tree({"proc/meminfo": f"MemAvailable: {64 * 2**20} kB", most: 8 * GIB, used: 7 * GIB, stat: ""})
    (root / stat).write_text(f"anon 1\ninactive_file {GIB}\n")
    assert machine.free_memory(root) == 2 * GIB, "the kernel gives up cached files"
    found = one(machine.memory_findings(_plan(4), root))  # type: ignore[arg-type]  # all that is read of a plan
    assert "2.0 of 8.0 GiB of host memory are free, and the run takes 4.0 (training)" in found.fact
    assert not has_fault(machine.memory_findings(_plan(1), root))  # type: ignore[arg-type]


def test_host_memory_over_the_limit_of_a_job(tree: Tree) -> None:
    """A scheduler limits a group that lies deeper than a container's."""
    job = "sys/fs/cgroup/slurm/job_7"
    files: dict[str, object] = {"proc/meminfo": f"MemAvailable: {64 * 2**20} kB", "proc/self/cgroup": "0::/slurm/job_7"}
    files["proc/self/mountinfo"] = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    files |= {"sys/fs/cgroup/slurm/memory.max": "max", f"{job}/memory.max": 3 * GIB, f"{job}/memory.current": GIB}
    assert machine.free_memory(tree(files)) == 2 * GIB
    assert "2.0 of 3.0 GiB" in one(machine.memory_findings(_plan(4), tree(files))).fact  # type: ignore[arg-type]


def test_fewer_cores_than_programs_see(tree: Tree) -> None:
    assert (
        "may use 0.5" in one(machine.core_findings(2, tree({"sys/fs/cgroup/cpu.max": "50000 100000"})), "warning").fact
    )
    old = {"sys/fs/cgroup/cpu.max": "", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 50000}
    old["sys/fs/cgroup/cpu/cpu.cfs_period_us"] = 100000
    assert one(machine.core_findings(2, tree(old)), "warning")
    assert machine.core_findings(2, tree({"sys/fs/cgroup/cpu.max": "max 100000"}))[0].status == "fact"


def test_a_disk_that_is_full_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=10 * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    folders = {"--run-dir": tmp_path / "runs" / "new", "TMPDIR": tmp_path}
    found = one(machine.disk_findings(folders, {"--run-dir": ("checkpoints", 20.0 * GIB)}))
    assert "10.0 GiB free, and checkpoints take 20.0" in found.fact and "--keep-checkpoints" in found.cure
    assert not has_fault(machine.disk_findings(folders, {"--run-dir": ("checkpoints", 5.0 * GIB)}))
    found = one(machine.disk_findings({"--save-hf": tmp_path}, {"--save-hf": ("weights", 16.0 * GIB)}))
    assert "10.0 GiB free, and weights take 16.0" in found.fact and "checkpoints" not in found.cure
    usage.free = 0
    assert [f.fact.split(" ")[0] for f in machine.disk_findings(folders, {}) if f.status == "fault"] == [*folders]
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)  # root may write everywhere
    assert "may not write" in one(machine.disk_findings({"--run-dir": tmp_path / "run"}, {})).fact


def test_a_host_name_that_does_not_resolve_and_an_interface_that_is_not_there() -> None:
    found = one(network_findings({}, host="no-such-machine.invalid"))
    assert "no-such-machine.invalid" in found.fact and "/etc/hosts" in found.cure
    assert not has_fault(network_findings({}, host="localhost"))
    names = {"GLOO_SOCKET_IFNAME": "eth77", "NCCL_SOCKET_IFNAME": "=lo"}
    assert "no interface eth77" in one(network_findings(names, host="localhost")).fact
    assert not has_fault(network_findings({"NCCL_SOCKET_IFNAME": "^docker"}, host="localhost"))


def test_a_proxy_before_the_engines() -> None:
    proxy = {"http_proxy": "http://proxy:3128"}
    assert "no_proxy" in one(network_findings(proxy, host="localhost"), "warning").cure
    passed = network_findings(proxy | {"no_proxy": "localhost,127.0.0.1"}, host="localhost")
    assert all(finding.status == "fact" for finding in passed)


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:9/score", "http://u:secret@h:abc/x", "http://u:secret@h:99999", "http://u:secret@127.0.0.1:9"],
)
def test_a_server_that_does_not_answer_and_no_password_is_shown(address: str) -> None:
    found = one(address_findings("reward", "--rm-url", address))
    assert found.fact.startswith(f"--rm-url {address.replace('secret', '***')}: no ") and "secret" not in found.line()


_NvmlError = type("_NvmlError", (Exception,), {})


def _unknown(*_: object) -> None:
    raise _NvmlError("Not Supported")


def _nvml(monkeypatch: pytest.MonkeyPatch, **answers: object) -> None:
    """Stand in for NVIDIA's library, which no CPU machine has."""
    values: dict[str, object] = {"Count": 1, "HandleByIndex": object(), "Name": "NVIDIA H100", "TotalEccErrors": 0}
    values |= {"ComputeRunningProcesses": [], "MemoryInfo": SimpleNamespace(used=0, total=80 * GIB)}
    values = {f"nvmlDeviceGet{name}": value for name, value in values.items()} | {"nvmlInit": None}
    values |= {"nvmlShutdown": None, "nvmlSystemGetDriverVersion": "580.10", "nvmlSystemGetCudaDriverVersion": 13000}
    module = ModuleType("pynvml")
    for name, value in (values | answers).items():
        setattr(module, name, value if callable(value) else lambda *_, value=value: value)
    module.NVMLError = _NvmlError  # type: ignore[attr-defined]
    module.__getattr__ = lambda name: _unknown  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _nvml(monkeypatch)
    (found,) = gpu_findings()
    assert found.fact == "1 x NVIDIA H100; driver 580.10 for CUDA 13.0" and found.status == "fact"
    _nvml(monkeypatch, nvmlDeviceGetTotalEccErrors=3)
    assert "3 uncorrected memory errors" in one(gpu_findings()).fact
    _nvml(monkeypatch, nvmlDeviceGetCurrentClocksThrottleReasons=0x40)
    assert "hardware thermal slowdown" in one(gpu_findings(), "warning").fact
    running = [SimpleNamespace(pid=4242)]
    used = SimpleNamespace(used=70 * GIB, total=80 * GIB)
    _nvml(monkeypatch, nvmlDeviceGetComputeRunningProcesses=running, nvmlDeviceGetMemoryInfo=used)
    assert "70.0 of 80.0 GiB are in use by processes 4242" in one(gpu_findings(), "warning").fact


def test_nvml_is_shut_down_as_often_as_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    opened = {name: partial(calls.append, name) for name in ("nvmlInit", "nvmlShutdown")}
    for count in (1, _unknown):
        _nvml(monkeypatch, **opened, nvmlDeviceGetCount=count)
        gpu_findings()
    assert calls == ["nvmlInit", "nvmlShutdown"] * 2


def test_hidden_gpus_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = {"nvmlDeviceGetHandleByIndex": lambda number: number, "nvmlDeviceGetHandleByUUID": "by name"}
    errors = {"nvmlDeviceGetTotalEccErrors": lambda handle, *_: 3 * (handle == 0)}
    _nvml(monkeypatch, nvmlDeviceGetCount=4, **handles, **errors)
    assert "GPU 0 (NVIDIA H100): 3 uncorrected" in one(gpu_findings()).fact
    for hidden, kinds in (("2,1", "2 x"), ("GPU-4711", "1 x")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        (found,) = gpu_findings()
        assert found.fact.startswith(f"{kinds} NVIDIA H100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,1")
    assert "named twice" in one(gpu_findings()).fact


def test_the_report_counts_and_says_cures() -> None:
    findings = [fact("a", "x"), fault("b", "y", "z"), warning("c", "y", "z")]
    assert summary(findings) == "3 checks, 1 fault, 1 warning"
    assert summary(findings[:1] * 2) == "2 checks, no faults, no warnings"
    assert findings[1].line().splitlines() == ["FAULT  b          y", "                  cure: z"]


def test_gpus_are_looked_at_where_the_run_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_findings", lambda: [fact("gpu", "seen")])
    monkeypatch.setattr(examine.nodes, "torch_findings", lambda device: [])  # a process of its own
    for device in ("cpu", "cuda"):
        found = examine.machine_findings(examine.Examined(None, None, (), (), device), examine.Options())
        assert (fact("gpu", "seen") in found) == (device == "cuda")
