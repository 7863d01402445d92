"""The command as a user types it: exit codes, all mistakes at once, soon, and without loading the stack."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from fusionrl import cli
from fusionrl.cli.device import detect_device
from fusionrl.config import upstream_flags
from tests.observe.view_runs import sample, write_run
from tests.own_process import run_code

Capsys = pytest.CaptureFixture[str]
HEAVY = ("ray", "torch", "transformers", "megatron", "sglang", "sglang_router", "pydantic_settings")


@pytest.fixture
def good(tiny_model: Path, write_rows: Callable[..., Path]) -> list[str]:
    """Flags of a run without a mistake."""
    data = write_rows([{"input": f"{i}+1=", "label": str(i + 1)} for i in range(10)])
    return (
        f"--hf-checkpoint {tiny_model} --prompt-data {data} --label-key label --rm-type exact --rollout-batch-size 4"
        " --n-samples-per-prompt 2 --rollout-max-response-len 4 --num-epoch 2 --device cpu"
    ).split()


def messages(capsys: Capsys, *argv: str) -> list[str]:
    """What a command says that is refused."""
    assert cli.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines), lines
    return [line.removeprefix("error: ") for line in lines]


def test_mistakes_of_every_kind_in_one_go(good: list[str], tmp_path: Path, capsys: Capsys) -> None:
    """Values, combinations, files, hooks and arithmetic are told together, not one a try."""
    flags = (
        f"--lr fast --hf-checkpoint {tmp_path}/none --pipeline async --colocate --fp16 --tensor-model-parallel-size 3"
        f" --actor-num-gpus-per-node 4 --global-batch-size 3 --custom-rm-path no_module.rm --rollout-num-gpus 3"
        f" --eval-prompt-data a {tmp_path}/eval.jsonl --rollout-num-gpus-per-engine 2 --num-epoch"
    )
    found = messages(capsys, "train", *good, *flags.split())
    for part in (
        *("--lr fast", "none: there is no such folder", "--pipeline async", "--fp16", "which tp 3 × pp 1 × cp 1 does"),
        *("no_module", "eval.jsonl", "--global-batch-size 3", "--rollout-num-gpus 3 ", "--num-epoch: it needs"),
    ):
        assert sum(part in error for error in found) == 1, (part, found)
    found = messages(capsys, "plan", *good, "--rollout-batch-size", "eight", "--rm-type")  # and none twice
    assert [error.split(" ")[0].rstrip(":") for error in found] == ["--rm-type", "--rollout-batch-size"]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--global-batch-size 3", ["4 x --n-samples-per-prompt 2 = 8 samples", "sizes that divide 8: 1, 2, 4 and 8"]),
        ("--num-steps-per-rollout 3", ["= 8 samples", "sizes that divide 8: 1, 2, 4 and 8"]),
        ("--num-steps-per-rollout 2 --global-batch-size 8", ["= 8 samples", "8 x --num-steps-per-rollout 2 = 16"]),
        ("--actor-num-gpus-per-node 4 --global-batch-size 2", ["--global-batch-size 2", "4 data-parallel ranks"]),
        ("--num-epoch 1 --rollout-batch-size 16", ["--num-epoch 1 x 10 prompts", "--rollout-batch-size 16"]),
    ],
)
def test_sizes_come_with_their_arithmetic(good: list[str], flags: str, parts: list[str], capsys: Capsys) -> None:
    (found,) = messages(capsys, "plan", *good, *flags.split())
    assert all(part in found for part in parts), found


def printed(capsys: Capsys, *argv: str) -> str:
    """What a command prints that finds nothing to warn of."""
    assert cli.main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_a_plan_writes_nothing(good: list[str], tmp_path: Path, capsys: Capsys) -> None:
    plan = printed(capsys, "plan", *good)
    assert "5 rollout steps" in plan and "4 prompts x 2 samples = 8 samples" in plan
    assert printed(capsys, "train", *good, "--dry-run") == plan
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl"}
    plan = printed(capsys, "plan", *good, "--n-samples-per-prompt", "1")
    assert "\nwarning    --n-samples-per-prompt 1 with --advantage-estimator grpo: " in plan


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_a_plan_from_a_file(good: list[str], suffix: str, tmp_path: Path, capsys: Capsys) -> None:
    """The same plan as from the command line; a flag there goes before the file."""
    pairs = dict(zip(good[::2], good[1::2], strict=True))
    separator = " = " if suffix == "toml" else ": "
    lines = [f"{json.dumps(flag[2:])}{separator}{json.dumps(value)}" for flag, value in pairs.items()]
    file = tmp_path / f"run.{suffix}"
    file.write_text("{" + ",\n".join(lines) + "}" if suffix == "json" else "\n".join(lines))
    assert printed(capsys, "plan", "--config", str(file)) == printed(capsys, "plan", *good)
    assert "10 rollout steps" in printed(capsys, "plan", "--num-epoch", "4", "--config", str(file))


def test_mistakes_in_a_file_are_told_with_the_others(good: list[str], tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: fast\nnum_epoc: 3\nglobal-batch-size: 3\n")
    found = messages(capsys, "train", *good, "--config", str(file), "--seed", "x")
    for start in (f"{file}:1: --lr fast", f"{file}:2: --num-epoc", "--seed x", "--global-batch-size 3"):
        assert sum(start in error for error in found) == 1, (start, found)
    assert len(found) == 4
    for words in (["plan"], ["data", "check", "x.jsonl"]):
        assert len(messages(capsys, *words, "--config", "/no/run.yaml")) == 1


def test_the_first_error_comes_at_once(good: list[str]) -> None:
    """In seconds of a core, next to a loop that takes about one: a busy machine makes both slower."""

    def cpu_seconds(*command: str) -> tuple[float, subprocess.CompletedProcess[str]]:
        before = os.times()
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system, done

    flags = [*good, "--rollout-batch-size", "0", "--hf-checkpoint", "/nowhere"]
    loop, _ = cpu_seconds("-c", "sum(i * i for i in range(10_000_000))")
    error, done = cpu_seconds("-m", "fusionrl.cli", "train", *flags)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 2)
    assert error < 5 * loop, (error, loop)


def test_a_command_line_is_checked_without_the_stack(good: list[str], tmp_path: Path) -> None:
    """Neither what shows a run, nor checking the flags, nor any of the pure rooms loads ray, torch or sglang."""
    run = write_run(tmp_path / "run", [[sample(0)]])
    upstream_flags.sglang_parser()  # now the file with SGLang's flags is there
    program = f"""
import importlib, pkgutil, sys
from fusionrl.observe import curves, logs, metrics, progress, rollouts, run_dir
assert not {{"numpy", "matplotlib"}} & set(sys.modules)
from fusionrl import cli
assert cli.main(["view", {str(run)!r}]) == 0 and "pydantic" not in sys.modules
from fusionrl.cli.resolve import resolve
assert resolve({[*good, "--sglang-max-running-requests", "7"]!r})[0].passthrough.sglang
for room in ("config", "plan", "data", "rewards"):
    package = importlib.import_module("fusionrl." + room)
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import fusionrl.buffer.actor, fusionrl.plan.push_plan
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run_code(program).splitlines()[-1] == "[]"


def test_usage_and_unknown_commands(capsys: Capsys) -> None:
    assert "fusionrl train" in printed(capsys)
    assert cli.main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean `fusionrl train`?" in capsys.readouterr().err
    assert cli.main(["xyz"]) == 2 and "did you mean" not in capsys.readouterr().err
    text = printed(capsys, "train", "--help")
    assert "--rollout-batch-size SIZE" in text and "{rl,sft,reject-sampling,eval}" in text
    assert printed(capsys, "plan", "--help").startswith("usage: fusionrl plan ")
    assert "\n#lr: 1e-06\n" in printed(capsys, "flags", "--template")


def test_a_reader_that_has_enough_ends_nothing_with_a_traceback() -> None:
    """As `fusionrl train --help | head -1`: the pipe's other end is closed before the first write."""
    ends = os.pipe()
    os.close(ends[0])
    command = [sys.executable, "-m", "fusionrl.cli", "train", "--help"]
    done = subprocess.run(command, stdout=ends[1], stderr=subprocess.PIPE, text=True, check=False)
    os.close(ends[1])
    assert done.stderr == "" and done.returncode in (0, 120)


def test_the_broken_pipe_of_another_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a tracker's server that closes the connection: the command has not done its work."""
    monkeypatch.setattr(cli, "_run", Mock(side_effect=BrokenPipeError(32, "closed")))
    with pytest.raises(BrokenPipeError):
        cli.main(["track"])


def test_a_gpu_that_is_not_there(good: list[str], capsys: Capsys) -> None:
    if detect_device("auto") == "cuda":
        pytest.skip("this machine has a GPU")
    assert "--device cuda: this machine has no NVIDIA GPU" in messages(capsys, "plan", *good, "--device", "cuda")[0]


def test_a_file_cannot_say_that_a_run_is_supervised(good: list[str], tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "flags.yaml").write_text("supervise: true\n")
    (found,) = messages(capsys, "train", *good, "--config", str(tmp_path / "flags.yaml"), "--dry-run")
    assert found.startswith("--supervise: give it on the command line")
