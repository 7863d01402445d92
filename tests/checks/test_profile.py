"""--profile-…: what is profiled, and what is refused before a run starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.checks.outputs import profile_errors, profile_plan_errors
from fusionrl.config.config import Config
from fusionrl.config.parser import read_args
from fusionrl.config.run import ProfileOrder, nsys_command


def _config(*flags: str) -> Config:
    config, errors = read_args(["--mode", "rl", "--actor-num-gpus-per-node", "2", *flags])
    assert not errors
    return config


def test_steps_and_processes_are_read() -> None:
    assert ProfileOrder.of(_config("--profile-ranks", "1")) is None and profile_errors(_config(), "cpu") == []
    order = ProfileOrder.of(_config("--profile-steps", "3", "5-7", "--profile-ranks", "1", "engine-0", "engine-2"))
    assert [step for step in range(1, 10) if order.has(step)] == [3, 5, 6, 7]
    assert [rank for rank in range(3) if order.wants_trainer(rank)] == [1]
    assert [index for index in range(4) if order.wants_engine(index)] == [0, 2]
    first = ProfileOrder.of(_config("--profile-steps", "1"))
    assert (first.trainers, first.engines) == ({0}, {0})
    whole = ProfileOrder.of(_config("--profile-steps", "1", "--profile-ranks", "all"))
    assert whole.wants_trainer(999) and whole.wants_engine(999)


@pytest.mark.parametrize(
    ("flags", "device", "said"),
    [
        ("--profile-steps 0", "cpu", "--profile-steps 0: expected steps from 1 on"),
        ("--profile-steps 7-5", "cpu", "--profile-steps 7-5"),
        ("--profile-steps 3 --profile-ranks first", "cpu", "--profile-ranks first: give a trainer's rank"),
        ("--profile-steps 3 --profile-ranks 2", "cpu", "--profile-ranks 2: trainers have the ranks 0 to 1"),
        ("--profile-steps 3 --profile-tool memory", "cpu", "sees what a GPU does, and this run is on a CPU"),
        ("--profile-steps 3 --profile-tool nsys", "cuda", "no `nsys` on the PATH"),
    ],
)
def test_what_cannot_be_is_refused_with_its_cure(
    flags: str, device: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (error,) = profile_errors(_config(*flags.split()), device)
    assert said in error


def test_nsys_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nsys").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert profile_errors(_config("--profile-steps", "3", "--profile-tool", "nsys"), "cuda") == []
    command = nsys_command("/runs/a/profiles/engine-0.%n")
    assert command[:2] == ["nsys", "profile"] and "-o/runs/a/profiles/engine-0.%n" in command
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=repeat"} <= set(command)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("900", ["--profile-steps 900: the run ends with step 300"]),
        ("299-400 --profile-ranks 0 engine-1", []),
        ("3 --profile-ranks engine-9", ["--profile-ranks engine-9: the last of the engines is engine-1"]),
        ("3 --profile-ranks all", []),
    ],
)
def test_steps_and_engines_that_the_plan_does_not_have_are_refused(flags: str, said: list[str]) -> None:
    plan: Any = SimpleNamespace(num_engines=2, num_rollout=300)
    assert profile_plan_errors(_config("--profile-steps", *flags.split()), plan) == said
    without: Any = SimpleNamespace(num_engines=0, num_rollout=300)
    assert profile_plan_errors(_config("--profile-steps", "3"), without) == []
