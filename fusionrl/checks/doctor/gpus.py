"""The GPUs of this machine, asked through NVML: driver, memory errors, throttling, who else uses them."""

from __future__ import annotations

import os
from functools import partial
from types import ModuleType

from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.observe.hardware.nvml import as_text, ask
from fusionrl.plan.devices import GIB
from fusionrl.plan.visible_devices import VARIABLE, visible_names

_CHECK = "gpu"
_HOT = {
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}
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


def _all_findings(nvml: ModuleType) -> list[Finding]:
    try:
        visible = visible_names(os.environ.get(VARIABLE))
    except ValueError as error:
        text, _, cure = str(error).rpartition("; ")
        return [fault(_CHECK, text, cure)]
    findings, kinds = [], []
    for name in [str(index) for index in range(nvml.nvmlDeviceGetCount())] if visible is None else visible:
        find = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
        try:
            handle = find(int(name) if name.isdigit() else name)
        except nvml.NVMLError as error:
            cure = f"look at nvidia-smi, and at {VARIABLE}, where it is set"
            findings.append(fault(_CHECK, f"GPU {name}: NVML does not find it ({error})", cure))
            continue
        kinds.append(as_text(ask(nvml, partial(nvml.nvmlDeviceGetName, handle))) or "a GPU without a name")
        findings += _device_findings(nvml, handle, f"GPU {name} ({kinds[-1]})")
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    driver = as_text(ask(nvml, nvml.nvmlSystemGetDriverVersion)) or "unknown"
    cuda = ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    version = "" if cuda is None else f" for CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    return [fact(_CHECK, f"{counted or 'no GPU'}; driver {driver}{version}"), *findings]


def _device_findings(nvml: ModuleType, handle: object, name: str) -> list[Finding]:
    findings = []
    memory = ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    processes = ask(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    other_pids = [process.pid for process in processes if process.pid != os.getpid()]
    if other_pids or (memory is not None and memory.used > _BUSY):
        who = f"processes {', '.join(map(str, other_pids))}" if other_pids else "a process that is not seen from here"
        used = f"{memory.used / GIB:.1f} of {memory.total / GIB:.1f} GiB are" if memory is not None else "it is"
        text = f"{name}: {used} in use by {who}"
        cure = "end what is left of an earlier run (nvidia-smi shows it), or choose other GPUs: CUDA_VISIBLE_DEVICES"
        findings.append(warning(_CHECK, text, cure))
    kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = ask(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))
    if errors:
        cure = "reset the GPU (nvidia-smi -r, as root) or the machine; replace the card if they come back"
        findings.append(fault(_CHECK, f"{name}: {errors} uncorrected memory errors since the driver was loaded", cure))
    hot = _throttled(nvml, handle)
    if hot:
        cure = "look at cooling and power; one slow GPU makes all ranks wait"
        findings.append(warning(_CHECK, f"{name}: its clock is held down now ({', '.join(hot)})", cure))
    return findings


def _throttled(nvml: ModuleType, handle: object) -> list[str]:
    read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    read = read or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    reasons = ask(nvml, lambda: read(handle)) or 0
    return list(dict.fromkeys(text for name, text in _HOT.items() if reasons & getattr(nvml, name, 0)))
