"""One tiny model and its task for every end-to-end test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with model/, sft.jsonl, train.jsonl and eval.jsonl of the quickstart's task."""
    folder = tmp_path_factory.mktemp("task")
    tool = Path(__file__).parents[2] / "tools" / "make_quickstart.py"
    subprocess.run([sys.executable, str(tool), "--out", str(folder), "--seed", "5"], check=True, capture_output=True)
    lines = (folder / "eval.jsonl").read_text().splitlines()[:32]
    (folder / "eval.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def rl_flags(task: Path) -> list[str]:
    """A small rl run: 8 prompts x 4 samples a step, partial credit so that there is something to learn from."""
    return [
        *("--mode", "rl", "--hf-checkpoint", str(task / "model")),
        *("--prompt-data", str(task / "train.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *("--apply-chat-template", "--custom-rm-path", "tests/e2e/hooks.py:partial_credit"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
        *("--rollout-shuffle", "--lr", "1e-3", "--device", "cpu"),
    ]
