"""The GPUs of this machine, asked through NVML: driver, memory errors, throttling, who else uses them."""

import os
from types import ModuleType

from fusionrl.checks.doctor.findings import Finding, fact, fault, warning
from fusionrl.observe.hardware import Device, Nvml, ask
from fusionrl.plan.devices import GIB
from fusionrl.plan.visible_devices import VARIABLE, visible_names

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
