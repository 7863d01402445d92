"""Whole rl runs of families whose engines need something of their own on a CPU: every push is confirmed."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.launch import launch, metrics_of, run, train_steps
from tests.e2e.test_pipelines import LONG_ANSWERS
from tools.family_loops import make_model
from tools.rescoring import checkpoint_versions, rescore, saved_samples

pytestmark = pytest.mark.e2e
# The others: tools/family_loops.py.
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


def test_states_of_delta_nets_are_computed_again_after_a_push_and_a_death(
    task: Path, rl_flags: list[str], tmp_path: Path
) -> None:
    """Each token has the log-prob of the weights that it claims, though answers outlive pushes and an engine dies."""
    model, folder = tmp_path / "model", tmp_path / "run"
    make_model("qwen3_5_text", task, model)
    flags = [*rl_flags, "--hf-checkpoint", str(model), "--pipeline", "async-partial", *LONG_ANSWERS]
    flags += ["--update-weight-transport", "broadcast", "--run-dir", str(folder), "--num-rollout", "4"]
    flags += ["--custom-generate-function-path", "tests/e2e/hooks.py:spans_a_push"]
    flags += ["--rollout-num-gpus", "2", "--use-fault-tolerance", "--rollout-health-check-interval", "2"]
    with launch([*flags, "--save-interval", "1"], tmp_path) as launched:
        launched.wait_for(lambda: len(train_steps(folder)) >= 2)
        (server,) = launched.find(r"^\S+ -m fusionrl\.engines\.launch_server .*--random-seed 43 ")
        os.kill(server, signal.SIGKILL)
        assert launched.wait(300) == 0, launched.output()[-3000:]
    assert "engine 1 is dead" in launched.output()
    found = rescore(saved_samples(folder), checkpoint_versions(folder, model), max_staleness=2)
    assert found.told() == [] and found.samples == 4 * 8 * 4 and found.stale_tokens > 0 and found.spanning > 0
