"""What a run saves of its samples: every token has its mask, log-prob and version, and they are what it was sampled by.

The learning rate is 0, so that one model of transformers can score what all versions of the weights sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusionrl.observe.rollouts import read_rollouts
from tests.e2e.launch import metrics_of, run

pytestmark = pytest.mark.e2e


def saved_samples(folder: Path) -> list[dict[str, Any]]:
    """Every row, with the number of its rollout, which is the version of the weights that it was made with."""
    return [row | {"rollout": row["rollout_id"]} for row in read_rollouts(folder, "train")]


def check(rows: list[dict[str, Any]], model_folder: Path) -> None:
    """Fields run over the response; sampled tokens have the model's log-probs, others mask 0 and log-prob 0."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    for row in rows:
        count = row["response_length"]
        assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == len(row["weight_versions"]) == count
        assert row["weight_versions"] == sorted(row["weight_versions"])
        tokens = torch.tensor(row["tokens"])[None]
        with torch.no_grad():
            log_probs = model(tokens).logits[0].log_softmax(-1)[-count - 1 : -1]
        wanted = log_probs.gather(-1, tokens[0, -count:, None])[:, 0].numpy()
        found = np.array(row["rollout_log_probs"])
        sampled = found != 0
        assert np.abs(found - wanted)[sampled].max() <= 1e-4
        assert not np.any(np.array(row["loss_mask"])[~sampled])


def test_partial_rollouts(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*rl_flags, "--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--over-sampling-batch-size", "16"]
    # Few at a time, and long enough that answers end when they do: some are always under way when a rollout ends.
    flags += ["--rollout-max-response-len", "128", "--sglang-max-running-requests", "16"]
    flags += ["--num-rollout", "4", "--lr", "0", "--no-save"]
    run([*flags, "--run-dir", str(folder)], tmp_path)
    rows = saved_samples(folder)
    assert len(rows) == 4 * 8 * 4
    assert sum(row["rollout/partial_samples"] for row in metrics_of(folder) if "rollout/partial_samples" in row) > 0
    check(rows, task / "model")
    mixed = [row for row in rows if len(set(row["weight_versions"])) > 1]
    assert mixed
    for row in rows:  # only what this rollout sampled is trained on; of a sibling finished in an earlier one nothing
        assert row["loss_mask"] == [int(version == row["rollout"]) for version in row["weight_versions"]]
    trained = [row for row in metrics_of(folder) if "rollout/staleness/token_max" in row]
    assert len(trained) == 4 and all(row["rollout/staleness/token_max"] == 0 for row in trained)


def test_turns_with_a_tool(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Two turns with a tool's answer between them, by the pieces that agents are made of."""
    folder = tmp_path / "run"
    flags = [*rl_flags, "--custom-generate-function-path", "tests/e2e/hooks.py:two_turns"]
    flags += ["--rollout-max-response-len", "40", "--num-rollout", "2", "--lr", "0", "--no-save"]
    run([*flags, "--run-dir", str(folder)], tmp_path)
    rows = saved_samples(folder)
    assert len(rows) == 2 * 8 * 4
    check(rows, task / "model")
    tool = AutoTokenizer.from_pretrained(task / "model").encode("=42 ", add_special_tokens=False)
    both = 0
    for row in rows:
        response, mask = row["tokens"][-row["response_length"] :], row["loss_mask"]
        places = [i for i in range(len(mask) - len(tool) + 1) if response[i : i + len(tool)] == tool]
        masked = [i for i, trained in enumerate(mask) if not trained]
        if masked:
            both += masked[-1] < len(mask) - 1
            assert masked == list(range(masked[0], masked[0] + len(tool))) and masked[0] in places
    assert both > 0
    trained = sum(row["train/num_tokens"] for row in metrics_of(folder) if "train/num_tokens" in row)
    assert trained == sum(sum(row["loss_mask"]) for row in rows)
