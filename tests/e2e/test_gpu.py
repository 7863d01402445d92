"""What only a GPU can show: the loop in bf16 with CUDA IPC between trainer and engine on one device."""

from pathlib import Path

import pytest

from fusionrl.cli.device import detect_device
from tests.e2e.launch import metrics_of, run
from tests.tiny_model import make_fp8

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.skipif(detect_device("auto") != "cuda", reason="no NVIDIA GPU on this machine"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_colocated_cuda_ipc(precision: str, rl_flags: list[str], tmp_path: Path) -> None:
    """One device holds a trainer and an engine; the engine gives its memory back while the trainer works."""
    folder = tmp_path / "run"
    flags = [*rl_flags, "--device", "cuda", "--colocate", "--precision", precision, "--num-rollout", "3"]
    flags += ["--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch"]
    flags += ["--sglang-mem-fraction-static", "0.3", "--verify-weights", "always", "--run-dir", str(folder)]
    run([*flags, "--save-interval", "2", "--save-hf", str(tmp_path / "hf")], tmp_path, timeout_s=600)
    assert (tmp_path / "hf" / "config.json").is_file() and (folder / "checkpoints" / "step_000003").is_dir()
    rows = metrics_of(folder)
    assert "by ipc" in (folder / "plan.txt").read_text()
    limit = 1e-3 if precision == "fp32" else 0.1
    assert all(row["sync/verify_logprob_diff"] < limit for row in rows)
    assert all(row["train/logprob_diff_mean"] < limit for row in rows[1:])


def test_engines_in_block_wise_fp8(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """The trainers read the fp8 checkpoint in full precision, and push what they made of it in fp8."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}  # blocks of 128 must fit
    config = AutoConfig.from_pretrained(task / "model")
    for name, size in sizes.items():
        setattr(config, name, size)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bf16")
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(tmp_path / "bf16")
    make_fp8(tmp_path / "bf16", tmp_path / "fp8", (128, 128))
    folder = tmp_path / "run"
    flags = [*rl_flags, "--hf-checkpoint", str(tmp_path / "fp8"), "--device", "cuda", "--colocate"]
    flags += ["--precision", "bf16", "--num-rollout", "3", "--no-save", "--run-dir", str(folder)]
    flags += ["--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch"]
    flags += ["--sglang-mem-fraction-static", "0.3", "--verify-weights", "always"]
    run(flags, tmp_path, timeout_s=600)
    assert "in block-wise fp8" in (folder / "plan.txt").read_text()
    assert all(row["sync/verify_logprob_diff"] < 0.1 for row in metrics_of(folder))
