"""The same run twice, and a run that is killed and goes on, give the same numbers bit by bit.

Then resumes with other flags: what the metrics and the last message say.
"""

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from fusionrl.runtime.checkpoints import Checkpoint, compare_hashes
from tests.e2e import holds
from tests.e2e.deaths import router_of, writer_of
from tests.e2e.launch import launch, metrics_of, printed_by, run, samples_of_step, trained_prompts
from tools.repeat_runs import first_difference, weights_differ

pytestmark = pytest.mark.e2e
STEPS = 8
SAVES = ["--save-interval", "4", "--keep-checkpoints", "2", "--verify-checkpoints"]
NUMBERS = ("train/loss", "train/grad_norm", "train/entropy", "train/logprob_k3", "train/num_tokens")


def sft_flags(task: Path) -> list[str]:
    """A supervised run, which needs no engine."""
    flags = ["--mode", "sft", "--device", "cpu", "--hf-checkpoint", str(task / "model"), "--input-key", "messages"]
    return [*flags, "--prompt-data", str(task / "sft.jsonl")]


def numbers(folder: Path) -> dict[int, list[float]]:
    """Step → what training reported in the newest attempt, as it was printed: every bit of it."""
    newest: dict[int, tuple[int, list[float]]] = {}
    for row in metrics_of(folder):
        if "train/loss" in row and row["attempt"] >= newest.get(row["step"], (0, []))[0]:
            newest[row["step"]] = row["attempt"], [row[name] for name in NUMBERS if name in row]
    return {step: values for step, (_, values) in newest.items()}


def differing(one: Path, other: Path) -> list[str]:
    """Every metric of training and of the rollout in which the runs' first unequal step differs."""
    first, second = (
        {row["step"]: row for row in metrics_of(folder) if "train/loss" in row} for folder in (one, other)
    )  # of a step that ran twice, the later one
    for step in sorted(first):
        a, b = first[step], second.get(step, {})
        names = [name for name in a if name.startswith(("train/", "rollout/")) and a[name] != b.get(name)]
        if names:
            return [f"step {step}: {name} {a[name]!r}, {b.get(name)!r}" for name in names]
    return []


def untimed(folder: Path) -> list[dict[str, Any]]:
    """Every row of a run's metrics, without seconds and what the machine did."""
    left_out = ("perf/", "hardware/")
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(left_out)} for row in metrics_of(folder)]


def attempts(folder: Path) -> set[int]:
    return {row["attempt"] for row in metrics_of(folder) if "train/loss" in row}


def run_whole(flags: list[str], folder: Path) -> list[str]:
    """Run from start to end, in `whole`; return the flags of one in `killed` that ends in its middle."""
    flags = [*flags, "--num-rollout", str(STEPS), *SAVES]
    run([*flags, "--run-dir", str(folder / "whole")], folder)
    steps = numbers(folder / "whole")
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert len({tuple(values) for values in steps.values()}) > 1

    killed = [*flags, "--async-save", "--run-dir", str(folder / "killed"), "--resume"]
    return [*killed, "--custom-megatron-before-train-step-hook-path", "tests/e2e/hooks.py:waits_or_fails"]


def assert_equal(folder: Path, num_attempts: int) -> None:
    """Both runs have the same numbers at every step, after as many attempts of the killed one."""
    assert attempts(folder / "killed") == set(range(1, num_attempts + 1))
    assert numbers(folder / "killed") == numbers(folder / "whole"), differing(folder / "whole", folder / "killed")


def test_sft(task: Path, tmp_path: Path) -> None:
    """Two ranks, two optimizer steps a rollout. A hook raises: before the first optimizer step of a
    rollout, and in the middle of the next one. The run saves its trained steps; a resume continues from there."""
    flags = [*sft_flags(task), "--rollout-batch-size", "64", "--rollout-shuffle"]
    flags += ["--actor-num-gpus-per-node", "2", "--num-steps-per-rollout", "2"]
    killed = run_whole([*flags, "--lr", "1e-3", "--weight-decay", "0.01"], tmp_path)
    failed = run(killed, tmp_path, code=1, FUSIONRL_TEST_FAILS_AT="5 0").output()
    text = " ".join(failed.split())
    assert "failed: HookError: --custom-megatron-before-train-step-hook-path" in text and "no such column" in text
    assert "the run ended after step 5; step_000005 has all of it: --resume continues from there" in text
    command = re.search(r"to continue: fusionrl train (.*--resume)$", failed, re.MULTILINE)
    assert command is not None
    again = shlex.split(command[1])
    text = " ".join(run(again, tmp_path, code=1, FUSIONRL_TEST_FAILS_AT="6 1").output().split())
    assert "the trained steps could not be saved: the error interrupted the training of step 7" in text
    assert "the run ended after step 6; step 6 is lost: --resume continues from step_000005" in text
    run(again, tmp_path)
    assert_equal(tmp_path, 3)


@pytest.mark.xdist_group("recorded")
def test_live_rl_repeats(rl_flags: list[str], recorded: Path, tmp_path: Path) -> None:
    """The samples of engines, too: other batches and another number of engines give the same numbers and weights.

    So does a run whose router, Buffer and driver are killed, the driver also between the export and the end.
    """
    made = ["--save-debug-rollout-data", str(recorded / "{rollout_id}.jsonl")]
    other = ["--rollout-num-gpus", "2", "--sglang-max-running-requests", "3"]
    for name, more in (("one", made), ("other", other)):
        folder = tmp_path / name
        flags = [*rl_flags, *more, "--num-rollout", "3", "--no-save", "--save-hf", str(folder / "hf")]
        text = run([*flags, "--run-dir", str(folder)], tmp_path).output()
        reward = "--custom-rm-path tests/e2e/hooks.py:partial_credit"
        assert f"repeatable bit by bit if your functions are: {reward}" in " ".join(text.split())
        finding = json.loads((folder / "repeatable.json").read_text())
        assert finding == {"repeatable": None, "reasons": [], "functions": [reward]}
    assert first_difference(tmp_path / "one", tmp_path / "other") == ""
    assert not weights_differ(tmp_path / "one" / "hf", tmp_path / "other" / "hf")
    strike([*rl_flags, "--num-rollout", "3"], tmp_path / "struck", tmp_path)
    assert not weights_differ(tmp_path / "one" / "hf", tmp_path / "struck" / "hf")


def strike(flags: list[str], folder: Path, tmp_path: Path) -> None:
    """Run, and kill router, Buffer and driver amid a rollout each: the run continues and loses nothing."""
    flags += ["--supervise", "--save-interval", "1", "--save-hf", str(folder / "hf"), "--run-dir", str(folder)]
    with launch([*flags, *holds.flags(folder, rollouts=[0, 1, 2], num_steps=3)], tmp_path) as launched:
        victims = (
            lambda: router_of(launched),
            lambda: writer_of(folder / "logs" / "buffer.a1.log"),
            lambda: psutil.Process(launched.process.pid).children()[0].pid,
        )
        for rollout_id, victim in enumerate(victims):
            holds.wait_for_held(launched, folder, rollout_id)
            os.kill(victim(), signal.SIGKILL)
            holds.let_go(folder, rollout_id)
        launched.wait_for((folder / "timeline" / "driver.a2.jsonl").exists)
        driver = victims[-1]()
        launched.wait_for((folder / "exported.txt").exists, look_s=0.005)  # it ends its actors now, for a second
        os.kill(driver, signal.SIGKILL)
        assert launched.wait() == 0, launched.output()[-3000:]
    for name, count in (("router", 1), ("buffer", 1), ("driver", 2)):
        assert launched.output().count(f"starting the {name} again") == count
    assert not (folder / "exported.txt").exists() and (folder / "hf" / "README.md").is_file()
    rows = {row["step"]: row for row in metrics_of(folder)}
    assert [rows[step]["attempt"] for step in range(4)] == [1, 1, 2, 3]  # of 2 and 3, the pushes after a resume
    assert [row["step"] for row in metrics_of(folder) if "train/loss" in row] == [1, 2, 3]
    assert rows[1]["run/restarts_router"] == 1 and "run/restarts_buffer" not in rows[1]
    prompts = trained_prompts(folder)
    assert len(prompts) == len(set(prompts)) == 3 * 8


@pytest.mark.parametrize("pipeline", ["async", "async-partial"])
def test_a_replay_repeats(rl_flags: list[str], tmp_path: Path, pipeline: str) -> None:
    """A pipeline follows the record of a run in which training took less time: without it pushes would come later."""
    flags = [*rl_flags, "--pipeline", pipeline, "--num-rollout", "5", "--no-save"]
    flags += ["--custom-megatron-before-train-step-hook-path", "tests/e2e/hooks.py:takes_its_time"]
    if pipeline == "async-partial":  # answers that take longer than a step, of which some are under way at a push
        flags += ["--rollout-max-response-len", "96", "--admission-lead", "2", "--sglang-max-running-requests", "2"]
    texts = []
    for name, more, wait_s in (("one", [], "0"), ("other", ["--replay-schedule", str(tmp_path / "one")], "0.6")):
        folder = ["--run-dir", str(tmp_path / name), "--save-hf", str(tmp_path / name / "hf")]
        launched = run([*flags, *folder, *more], tmp_path, FUSIONRL_TEST_WAIT_S=wait_s)
        texts.append(" ".join(launched.output().split()))
    one, other = tmp_path / "one", tmp_path / "other"
    samples = [row for step in range(1, 6) for row in samples_of_step(one, step)]
    spanning = [row for row in samples if len(set(row["weight_versions"])) > 1]
    assert bool(spanning) == (pipeline == "async-partial"), len(spanning)
    assert (one / "schedule.a1.jsonl").read_bytes() == (other / "schedule.a1.jsonl").read_bytes()
    assert "equal in samples and metrics, times left out: steps 0-5" in printed_by("diff", one, other)
    assert first_difference(one, other, of_work=False) == ""
    assert not weights_differ(one / "hf", other / "hf")
    assert "not repeatable: " in texts[0] and "(--replay-schedule repeats such a run)" in texts[0]
    assert "repeatable bit by bit if your functions are: " in texts[1] and "not repeatable" not in texts[1]


@pytest.mark.xdist_group("recorded")
def test_rl_on_recorded_rollouts(rl_flags: list[str], recorded: Path, tmp_path: Path) -> None:
    if not (recorded / "1.jsonl").exists():  # else a test before has left them
        made = ["--num-rollout", "2", "--no-save", "--save-debug-rollout-data", str(recorded / "{rollout_id}.jsonl")]
        run([*rl_flags, *made, "--run-dir", str(tmp_path / "live")], tmp_path)
    for step in range(STEPS):
        shutil.copyfile(recorded / f"{step % 2}.jsonl", tmp_path / f"{step}.jsonl")
    template = str(tmp_path / "{rollout_id}.jsonl")
    without = rl_flags[: rl_flags.index("--prompt-data")] + rl_flags[rl_flags.index("--prompt-data") + 2 :]
    flags = [*without, "--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.01"]
    train = ["--debug-train-only", "--load-debug-rollout-data", template, "--num-steps-per-rollout", "2"]
    killed = run_whole([*flags, *train], tmp_path)
    hold = tmp_path / "hold"
    hold.touch()
    first = launch(killed, tmp_path, FUSIONRL_TEST_FILE=str(hold))
    first.wait_for(lambda: (tmp_path / "killed" / "checkpoints" / "step_000004" / "manifest.json").is_file())
    os.kill(first.process.pid, signal.SIGKILL)
    first.wait()
    first.assert_nothing_left()
    # Without Ray, in one process: every metric but the times.
    run([*(flag for flag in killed if flag != "--async-save"), "--in-process"], tmp_path)
    assert_equal(tmp_path, 2)
    whole, resumed = (untimed(tmp_path / name)[-STEPS // 2 :] for name in ("whole", "killed"))
    assert [row.pop("attempt") for row in whole + resumed] == STEPS // 2 * [1] + STEPS // 2 * [2]
    assert resumed == whole, differing(tmp_path / "whole", tmp_path / "killed")


def test_a_resume_that_differs_is_an_error() -> None:
    ranks = [{"weights": "a", "optimizer": "b", "rng": "c"}, {"weights": "d", "optimizer": "e", "rng": "f"}]
    saved: dict[str, Any] = {"buffer": "x", "trainers": ranks}
    checkpoint = Checkpoint(Path("run/checkpoints/step_000004"), 3, {"hashes": saved})
    compare_hashes(checkpoint, {"buffer": "x", "trainers": [dict(rank) for rank in ranks]}, same_layout=True)
    compare_hashes(checkpoint, {"buffer": "x", "trainers": [ranks[1]]}, same_layout=False)
    compare_hashes(Checkpoint(Path("old"), 3, {}), {"buffer": "y", "trainers": []}, same_layout=True)
    with pytest.raises(ValueError, match=r"step_000004 was loaded, but optimizer of trainer 1 is not"):
        compare_hashes(
            checkpoint, {"buffer": "x", "trainers": [ranks[0], ranks[1] | {"optimizer": "z"}]}, same_layout=True
        )
    with pytest.raises(ValueError, match="the data cursor"):
        compare_hashes(checkpoint, {"buffer": "y", "trainers": ranks}, same_layout=False)


def rates(folder: Path) -> dict[tuple[int, int], float]:
    """(attempt, step) → learning rate."""
    return {(row["attempt"], row["step"]): row["train/lr"] for row in metrics_of(folder) if "train/lr" in row}


def test_runs_that_are_stopped_and_resumed_with_other_flags(task: Path, tmp_path: Path) -> None:
    """Ctrl-C loses the steps after the newest checkpoint; SIGTERM saves first: test_security.py.

    The flags of a resume decide the learning rate: a decay that is made longer goes on, and another --lr is the one
    that is trained with.
    """
    folder = tmp_path / "run"
    flags = [*sft_flags(task), "--rollout-batch-size", "8", "--verify-checkpoints", "--run-dir", str(folder)]
    decay = ["--lr", "6e-3", "--lr-decay-style", "linear", "--save-interval", "1000"]
    run([*flags, *decay, "--num-rollout", "3"], tmp_path)
    short = ["--run-dir", str(folder), "--resume"]
    longer = run([*short, "--num-rollout", "6"], tmp_path)
    assert "--resume: --num-rollout 3 -> 6" in longer.output()
    assert "linear decay of the learning rate ends at optimizer step 6" in longer.output().replace("\n", " ")

    last = launch([*short, "--num-rollout", "100000", "--lr", "1e-2", "--lr-decay-style", "constant"], tmp_path)
    last.wait_for(lambda: any(attempt == 3 for attempt, _ in rates(folder)))
    os.kill(last.process.pid, signal.SIGINT)
    assert last.wait() == 130
    text = " ".join(last.output().split())
    lost = r"interrupted after step (\d+); (steps 7-\1 are|step \1 is) lost: --resume continues from step_000006"
    assert re.search(lost, text), text
    assert f"to continue: fusionrl train --run-dir {folder} --resume" in text

    found = rates(folder)
    assert [found[1, step] for step in (1, 2, 3)] == pytest.approx([6e-3, 4e-3, 2e-3])
    assert [found[2, step] for step in (4, 5, 6)] == pytest.approx([3e-3, 2e-3, 1e-3])
    assert found[3, 7] == pytest.approx(1e-2)
