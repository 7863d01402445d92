"""Entries of machines: host memory, GPUs, speed by device. `<group>`: trainers, engines, buffer, driver or ray."""

from __future__ import annotations

from fusionrl.observe.metric_entries.entry import Entry, Table

_GPU = "NVIDIA GPUs"

HARDWARE: Table = {
    "perf/mfu": Entry(
        "share",
        "Model FLOPs utilisation of the training: the FLOPs of forward and backward passes over all tokens that are"
        " trained on, prompts included, divided by what the trainers' devices could do in perf/time_train_s"
        " (--peak-tflops, or the data sheet's bf16). Log-prob passes and recomputation count as time,"
        " not as work; a critic or reward model likewise.",
        "runtime/hardware.py",
        "GPUs that the table has, or --peak-tflops",
    ),
    "perf/train_tokens_per_s_per_device": Entry(
        "tokens/s",
        "Tokens that are trained on, prompts included, divided by perf/time_train_s and the policy's trainer devices.",
        "runtime/hardware.py",
        "runs that train",
    ),
    "perf/generate_tokens_per_s_per_device": Entry(
        "tokens/s",
        "Response tokens of the rollout divided by perf/time_generate_s and the devices of the policy's engines. Under"
        " a pipeline that runs ahead, that time is the wait for the batch.",
        "runtime/hardware.py",
        "runs with engines",
    ),
    "hardware/host_bytes/<group>": Entry(
        "bytes",
        "Resident host memory at the end of the step, added up over the group's processes: trainers; engines (server,"
        " schedulers, actor); the Buffer with the reward processes; the driver; Ray's own on the driver's node. Pages"
        " that processes share count for each.",
        "runtime/hardware.py",
    ),
    "hardware/host_peak_bytes/<group>": Entry(
        "bytes",
        "The most resident host memory that one process of the group ever had (trainers).",
        "runtime/actor_process.py",
    ),
    "hardware/memory_peak_bytes/<group>": Entry(
        "bytes",
        "The most memory that torch had allocated on a GPU since the step before, of the rank with the most.",
        "runtime/actor_process.py",
        "trainers on GPUs",
    ),
    "hardware/memory_reserved_bytes/<group>": Entry(
        "bytes",
        "The most memory that torch had reserved on a GPU since the step before, of the rank with the most.",
        "runtime/actor_process.py",
        "trainers on GPUs",
    ),
    "hardware/memory_used_bytes/<group>": Entry(
        "bytes",
        "The most memory in use on a GPU of the group, by any process, sampled every second since the last step.",
        "observe/hardware/meter.py",
        _GPU,
    ),
    "hardware/utilisation/<group>": Entry(
        "share",
        "Share of time in which a kernel ran, mean over the group's GPUs and the looks since the step before.",
        "observe/hardware/meter.py",
        _GPU,
    ),
    "hardware/power_w/<group>": Entry(
        "watts", "Power of a GPU, mean over the group and the looks.", "observe/hardware/meter.py", _GPU
    ),
    "hardware/temperature_c/<group>": Entry(
        "degrees Celsius", "Of the hottest GPU of the group.", "observe/hardware/meter.py", _GPU
    ),
    "hardware/slowed/<group>": Entry(
        "share",
        "Share of the looks in which a GPU ran slower than it could: power cap, heat, power brake.",
        "observe/hardware/meter.py",
        _GPU,
    ),
    "hardware/ecc_errors/<group>": Entry(
        "errors",
        "Uncorrected memory errors of the worst GPU since its driver was loaded.",
        "observe/hardware/meter.py",
        "GPUs with ECC",
    ),
}
