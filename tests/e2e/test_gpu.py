"""What only a GPU can show: the loop in bf16 with CUDA IPC between trainer and engine on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionrl.cli import detect_device
from tests.e2e.launch import metrics_of, run

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.skipif(detect_device("auto") != "cuda", reason="no NVIDIA GPU on this machine"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_colocated_cuda_ipc(precision: str, rl_flags: list[str], tmp_path: Path) -> None:
    """One device holds a trainer and an engine; the engine gives its memory back while the trainer works."""
    folder = tmp_path / "run"
    flags = [*rl_flags, "--device", "cuda", "--colocate", "--precision", precision, "--num-rollout", "3", "--no-save"]
    flags += ["--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch"]
    flags += ["--sglang-mem-fraction-static", "0.3", "--verify-weights", "always", "--run-dir", str(folder)]
    run(flags, tmp_path, timeout_s=600)
    rows = metrics_of(folder)
    assert "by ipc" in (folder / "plan.txt").read_text()
    limit = 1e-3 if precision == "fp32" else 0.1
    assert all(row["sync/verify_logprob_diff"] < limit for row in rows)
    assert all(row["train/logprob_diff_mean"] < limit for row in rows[1:])
