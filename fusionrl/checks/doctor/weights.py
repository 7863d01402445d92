"""The weights themselves, for `fusionrl doctor --deep`: all are numbers."""

from __future__ import annotations

from pathlib import Path

from fusionrl.checks.doctor.findings import Finding, fact, fault
from fusionrl.models.weight_files import stored_tensors

_CHECK = "weights"
_FLOATS = ("F16", "BF16", "F32", "F64")


def weight_findings(folder: Path) -> list[Finding]:
    """Read every tensor of a Hugging Face folder, one at a time, and look for what is not finite."""
    import torch
    from safetensors import safe_open

    try:
        stored = stored_tensors(folder)
    except ValueError as error:
        return [fault(_CHECK, str(error), "copy the model again")]
    bad, num_read = [], 0
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(file, framework="pt") as reader:
            for name in sorted(name for name, tensor in stored.items() if tensor.file == file):
                if stored[name].dtype in _FLOATS:
                    num_read += 1
                    bad += [] if torch.isfinite(reader.get_tensor(name)).all() else [name]
    if bad:
        text = f"{len(bad)} of {num_read} tensors have values that are not finite, the first: {bad[0]}"
        return [fault(_CHECK, text, "copy the model again, or take an earlier checkpoint: the first loss would be NaN")]
    return [fact(_CHECK, f"all values of {num_read} tensors are finite")]
