"""Generated data of reasoning-gym: disjoint splits, right labels, several tasks, and flags."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusionrl.data.sample import Sample
from plugins.rewards.reasoning_gym_reward import exact_reward, reward
from tools.make_reasoning_data import main

pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym: scripts/setup-env.sh examples")
ROOT = Path(__file__).resolve().parents[2]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/make_reasoning_data.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main_of(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """The command in this process: importing all tasks takes seconds."""
    monkeypatch.setattr(sys, "argv", ["make_reasoning_data.py", *flags])
    main()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reasoning")
    done = run("--out", str(out), "--train-size", "120", "--eval-size", "30", "--max-terms", "3", "--min-digits", "1")
    assert done.returncode == 0, done.stderr
    return out


def test_prompts_are_disjoint_and_labels_are_right(data: Path) -> None:
    train, held_out = rows(data / "train.jsonl"), rows(data / "eval.jsonl")
    assert (len(train), len(held_out)) == (120, 30)
    held = {row["prompt"] for row in held_out}
    assert len(held) == 30
    assert not held & {row["prompt"] for row in train}
    for row in train + held_out:
        expression = row["metadata"]["entry"]["metadata"]["expression"]
        assert expression in row["prompt"]
        total, sign = 0, 1
        for part in expression.split():
            if part in "+-":
                sign = 1 if part == "+" else -1
            else:
                total += sign * int(part)
        assert int(row["label"]) == total


def test_the_verifier_scores_the_last_number(data: Path) -> None:
    row = rows(data / "eval.jsonl")[0]

    def score(response: str) -> float:
        sample = Sample(prompt=row["prompt"], response=response, metadata=row["metadata"])
        return asyncio.run(reward(None, sample))

    assert score(f"First 3, so the sum is {row['label']}.") == 1.0
    assert score(f"{row['label']}, no: {int(row['label']) + 1}") < 1.0
    assert score("I do not know") == 0.0
    # The verifier gives part of the score to an answer that contains the right one.
    sample = Sample(response=f"{row['label']}5", metadata=row["metadata"])
    assert 0.0 < asyncio.run(reward(None, sample)) < 1.0
    assert asyncio.run(exact_reward(None, sample)) == 0.0
    assert asyncio.run(exact_reward(None, Sample(response=row["label"], metadata=row["metadata"]))) == 1.0


def test_several_tasks_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("countdown.min_numbers=3", "countdown.max_numbers=3")
    sizes = ("--train-size", "3", "--eval-size", "2")
    main_of(monkeypatch, "--out", str(tmp_path), "--task", "countdown", "gcd", *sizes, "--config", *settings)
    told = capsys.readouterr().out
    countdown, gcd = tmp_path / "countdown", tmp_path / "gcd"
    assert f"--prompt-data countdown={countdown}/train.jsonl gcd={gcd}/train.jsonl" in told
    assert f"--eval-prompt-data countdown {countdown}/eval.jsonl gcd {gcd}/eval.jsonl" in told
    made = rows(countdown / "train.jsonl")
    assert len(made) == 3 and len(rows(gcd / "eval.jsonl")) == 2
    for row in made:
        assert len(row["metadata"]["entry"]["metadata"]["numbers"]) == 3
        assert eval(row["label"]) == row["metadata"]["entry"]["metadata"]["target"]


def test_too_few_different_sums_is_an_error_that_names_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="--max-digits"):
        main_of(monkeypatch, "--out", str(tmp_path), "--max-terms", "2", "--eval-size", "250")
    assert not (tmp_path / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--min-terms", "4"), "--max-terms 2"),
        (("--template", "hello"), "{expression}"),
        (("--eval-size", "0"), "eval"),
        (("--task", "count_down"), "unknown; known are all, ab, acre"),
        (("--task", "gcd", "--max-terms", "3"), "--max-terms belongs to --task chain_sum"),
        (("--task", "gcd", "--template", "{expression}"), "no {question}"),
        (("--task", "gcd", "--config", "max_valu=3"), "gcd has no setting 'max_valu'; it has min_numbers"),
        (("--task", "gcd", "lcm", "--config", "max_value=3"), "TASK.KEY=VALUE"),
        (("--task", "gcd", "--config", "lcm.max_value=3"), "lcm is none of --task gcd"),
    ],
)
def test_bad_flags_are_named(
    tmp_path: Path,
    flags: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main_of(monkeypatch, "--out", str(tmp_path), *flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
