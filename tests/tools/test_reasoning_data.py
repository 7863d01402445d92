"""Generated data of reasoning-gym: disjoint splits, right labels, several tasks, and flags."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fusionrl.data.sample import Sample
from plugins.rewards.reasoning_gym_reward import exact_reward, reward
from tests.tools.conftest import Command
from tools.make_reasoning_data import main

pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym: scripts/setup-env.sh examples")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reasoning")
    with pytest.MonkeyPatch.context() as patch:
        flags = f"--out {out} --train-size 120 --eval-size 30 --max-terms 3 --min-digits 1"
        patch.setattr(sys, "argv", ["", *flags.split()])
        main()
    return out


def test_prompts_are_disjoint_and_labels_are_right(data: Path) -> None:
    train, held_out = rows(data / "train.jsonl"), rows(data / "eval.jsonl")
    held = {row["prompt"] for row in held_out}
    assert (len(train), len(held_out), len(held)) == (120, 30, 30) and not held & {row["prompt"] for row in train}
    for row in train + held_out:
        expression = row["metadata"]["entry"]["metadata"]["expression"]
        assert expression in row["prompt"] and int(row["label"]) == eval(expression)


def test_the_verifier_scores_the_last_number(data: Path) -> None:
    row = rows(data / "eval.jsonl")[0]

    def score(response: str, function: Any = reward) -> float:
        return asyncio.run(function(None, Sample(response=response, metadata=row["metadata"])))

    assert score(f"First 3, so the sum is {row['label']}.") == 1.0
    assert score(f"{row['label']}, no: {int(row['label']) + 1}") < 1.0
    assert score("I do not know") == 0.0
    # The verifier gives part of the score to an answer that contains the right one.
    assert 0.0 < score(f"{row['label']}5") < 1.0 and score(f"{row['label']}5", exact_reward) == 0.0
    assert score(row["label"], exact_reward) == 1.0


def test_several_tasks_in_one_command(tmp_path: Path, command: Command) -> None:
    flags = "--task countdown gcd --train-size 3 --eval-size 2 --config countdown.min_numbers=3 countdown.max_numbers=3"
    _, told = command(main, "--out", tmp_path, *flags.split())
    countdown, gcd = tmp_path / "countdown", tmp_path / "gcd"
    assert f"--prompt-data countdown={countdown}/train.jsonl gcd={gcd}/train.jsonl" in told
    assert f"--eval-prompt-data countdown {countdown}/eval.jsonl gcd {gcd}/eval.jsonl" in told
    made = rows(countdown / "train.jsonl")
    assert len(made) == 3 and len(rows(gcd / "eval.jsonl")) == 2
    for row in made:
        assert len(row["metadata"]["entry"]["metadata"]["numbers"]) == 3
        assert eval(row["label"]) == row["metadata"]["entry"]["metadata"]["target"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--min-terms 4", "--max-terms 2"),
        ("--template hello", "{expression}"),
        ("--eval-size 0", "eval"),
        ("--task count_down", "unknown; known are all, ab, acre"),
        ("--task gcd --max-terms 3", "--max-terms belongs to --task chain_sum"),
        ("--task gcd --template {expression}", "no {question}"),
        ("--task gcd --config max_valu=3", "gcd has no setting 'max_valu'; it has min_numbers"),
        ("--task gcd lcm --config max_value=3", "TASK.KEY=VALUE"),
        ("--task gcd --config lcm.max_value=3", "lcm is none of --task gcd"),
    ],
)
def test_bad_flags_are_named(flags: str, message: str, tmp_path: Path, command: Command) -> None:
    code, said = command(main, "--out", tmp_path, *flags.split())
    assert code == 2 and message in said
