"""Whole rl runs of families whose engines need something of their own on a CPU: every push is confirmed."""

from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of, run
from tools.family_loops import make_model

pytestmark = pytest.mark.e2e
# The others: tools/family_loops.py; delta nets also under async-partial: test_pipelines.py.
FAMILIES = ["deepseek_v3", "qwen3_5_moe", "gemma3_text", "gpt_oss"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_push_is_confirmed(family: str, task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Latent attention with YaRN: what SGLang computes of its weights when it loads them, only log-probs confirm."""
    make_model(family, task, tmp_path / "model")
    flags = [*rl_flags, "--hf-checkpoint", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run"), "--no-save"]
    run([*flags, "--num-rollout", "2", "--verify-weights", "always", "--rollout-num-gpus", "1"], tmp_path)
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["sync/verify_logprob_diff"] < 1e-5 for row in rows)
    assert all(row["train/logprob_diff_max"] < 1e-5 and row["train/grad_norm"] > 0 for row in rows[1:])
