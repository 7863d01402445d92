"""Agents with the client packages of both protocols, trained two steps; every token is scored by transformers."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fusionrl.observe.rollouts import read_rollouts
from tests.e2e.launch import metrics_of, run
from tests.e2e.samples import check
from tests.e2e.session_agents import FORGETS

pytestmark = pytest.mark.e2e
AGENTS = "tests/e2e/session_agents.py"
PACKAGES = {"by_openai": "openai", "by_anthropic": "anthropic"}
INSTALLED = [agent for agent, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]


def session_flags(rl_flags: list[str], agent: str) -> list[str]:
    """The small rl run, with an agent that gives the reward itself, and room for its three turns."""
    place = rl_flags.index("--custom-rm-path")
    flags = rl_flags[:place] + rl_flags[place + 2 :]
    flags += ["--custom-generate-function-path", "fusionrl.rollout.sessions.generate", "--agent-path", agent]
    return [*flags, "--rollout-max-context-len", "120"]


@pytest.mark.skipif(not INSTALLED, reason=f"none of {list(PACKAGES.values())} is installed")
def test_agents_are_trained(task: Path, rl_flags: list[str], tmp_path: Path) -> None:
    """Samples of both steps have the log-probs of the weights that sampled them; a rewritten history is two samples.

    Half of the agents talk by either protocol, where both packages are installed.
    """
    folder = tmp_path / "run"
    agent = "in_turns" if len(INSTALLED) == len(PACKAGES) else INSTALLED[0]
    flags = [*session_flags(rl_flags, f"{AGENTS}:{agent}"), "--num-rollout", "2", "--no-save"]
    flags += ["--update-weight-transport", "disk", "--update-weight-mode", "full"]
    flags += ["--custom-update-weight-post-write-path", f"{AGENTS}:keep_weights", "--run-dir", str(folder)]
    run(flags, tmp_path)
    metrics = [row for row in metrics_of(folder) if "train/loss" in row]
    assert len(metrics) == 2
    pushed = sorted((tmp_path / "pushed").iterdir())
    rows = list(read_rollouts(folder, "train"))
    by_step: list[list[dict[str, Any]]] = [[row for row in rows if row["rollout_id"] == step] for step in range(2)]
    for step, (made, told) in enumerate(zip(by_step, metrics, strict=True)):
        shutil.copy(task / "model" / "config.json", pushed[step])
        check(made, pushed[step])
        assert all(
            value == 0
            for row in made
            for value, trained in zip(row["rollout_log_probs"], row["loss_mask"], strict=True)
            if not trained
        )
        assert sum(sum(row["loss_mask"]) for row in made) == told["train/num_tokens"] > 0
        assert told["train/logprob_diff_mean"] < 1e-4 and told["train/grad_norm"] > 0
        assert all(set(row["weight_versions"]) == {step} for row in made)
        # Three turns in one sample; of those that forget two in the first and one in the second.
        turns = {row["index"]: [] for row in made}
        for row in made:
            turns[row["index"]].append(row["metadata"]["session"]["num_turns"])
            runs = np.count_nonzero(np.diff([0, *row["loss_mask"]]) == 1)
            assert runs == row["metadata"]["session"]["num_turns"], "each turn is a stretch of trained tokens"
        assert len(turns) == 32
        assert all(found == ([2, 1] if index % FORGETS == 0 else [3]) for index, found in turns.items())
        assert told["rollout/session_rewrites"] == len(made) - 32 > 0
    assert not torch.equal(
        *(AutoModelForCausalLM.from_pretrained(one).model.embed_tokens.weight for one in pushed[:2])
    ), "the second step is sampled by other weights"
