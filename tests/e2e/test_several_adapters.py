"""Two adapters learn two tasks that exclude each other, on one engine and the same prompts."""

from pathlib import Path

import pytest

from tests.e2e.launch import metrics_of, run

pytestmark = pytest.mark.e2e


def test_two_adapters_learn_tasks_that_exclude_each_other(rl_flags: list[str], task: Path, tmp_path: Path) -> None:
    """Batches of the stream have samples of both, and each adapter learns from its own answers."""
    place, names = rl_flags.index("--prompt-data"), ("sevens", "others")
    rows = str(task / "train.jsonl")
    flags = [*rl_flags[: place + 1], *(f"{name}={rows}" for name in names), *rl_flags[place + 2 :]]
    flags += ["--prompt-data-weights", "1", "1", "--custom-rm-path", "tests/e2e/hooks.py:sevens_or_others"]
    flags += ["--n-samples-per-prompt", "8", "--lora-rank", "8", "--lora-adapters", *names, "--lr", "1e-2"]
    flags += ["--pipeline", "async-partial", "--num-rollout", "12", "--no-save", "--rollout-max-response-len", "4"]
    run([*flags, "--run-dir", str(tmp_path / "run"), "--save-hf", str(tmp_path / "out")], tmp_path)
    steps = [row for row in metrics_of(tmp_path / "run") if "train/loss" in row]
    for name in names:
        key = f"adapter/{name}/raw_reward"
        rewards = [row[key] for row in steps if key in row]
        # One policy for both could not have more than half of both rewards.
        assert rewards[0] < 0.3 and max(rewards[-3:]) > 0.6, f"{name} learns: {rewards}"
        assert (tmp_path / "out" / name / "adapter_model.safetensors").is_file()
    counts = [[row.get(f"adapter/{name}/num_samples", 0) for name in names] for row in steps]
    assert all(sum(each) == 64 for each in counts) and sum(min(each) > 0 for each in counts) > len(steps) // 2
    assert max(row["rollout/staleness/token_max"] for row in steps) <= 2
