"""tools/chaos.py: which runs it makes, and how it sees a hang, a wrong end, other weights and a process that stays."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import chaos_process as process

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import chaos

    return chaos


# A supervised run in small: the driver is a child that writes its timeline, and is started again when it is killed; a
# child of it outlives it, as an engine may for a moment.
PROGRAM = """
import json, pathlib, subprocess, sys, time
folder, seconds, driver = pathlib.Path(sys.argv[1]), float(sys.argv[2]), '''
import json, pathlib, subprocess, sys, time
folder, attempt = pathlib.Path(sys.argv[4]), sys.argv[5]
with open(folder / "timeline" / f"driver.a{attempt}.jsonl", "w", buffering=1) as file:
    file.write('{"process": "driver"}\\\\n')
    def say(*record):
        file.write(json.dumps(record) + chr(10))
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "stays"], start_new_session=True)
    say("B", "", "start", 0, {}), time.sleep(0.2), say("X", "", "start", 0, 0, {})
    for step in (1, 2):
        say("B", "", "step", 0, {"step": step})
        for name in ("generate", "train", "push"):
            say("B", "", name, 0, {}), say("B", "other thread", "save", 0, {}), time.sleep(0.3)
            say("X", "", name, 0, 0, {})
        say("X", "", "step", 0, 0, {"step": step})
'''
(folder / "timeline").mkdir()
for attempt in (1, 2, 3, 4):
    command = [sys.executable, "-m", "fusionrl.cli", "train", str(folder), str(attempt)]
    command = [sys.executable, "-c", driver, *command[1:]]
    if subprocess.call(command) == 0:
        break
time.sleep(seconds)
"""


def test_signals_come_at_their_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a driver that was started again. The program finds what is left, and a part that is not there."""
    monkeypatch.setitem(process._COMMANDS, "driver", r" -m fusionrl\.cli train ")
    monkeypatch.setitem(process._COMMANDS, "engine", r"stays$")
    faults = [
        process.Fault("driver", "KILL", "start", 0, 0.0),
        process.Fault("driver", "KILL", "push", 1, 0.0),
        process.Fault("engine", "STOP", "train", 0, 0.0),
        process.Fault("driver", "KILL", "save", 0, 0.0),  # there is none but in another thread
    ]
    running = process.SupervisedRun([sys.executable, "-c", PROGRAM, str(tmp_path), "0"], tmp_path / "output.txt")
    end = running.run(faults, tmp_path, 60)
    assert (end.code, end.states) == (0, ["start after step 0", "push after step 1", "train after step 0", None])
    left = running.left(0.5)
    assert len(left) == 3 and all("stays" in line for line in left) and running.left(5) == []
    assert process.check_end(end) == []


def test_how_a_run_ends(tmp_path: Path) -> None:
    running = process.SupervisedRun([sys.executable, "-c", PROGRAM, str(tmp_path), "60"], tmp_path / "output.txt")
    end = running.run([], tmp_path, 4)
    assert process.check_end(end)[0].startswith("a hang: it did not end in time") and running.left(5) == []
    for code, output, violation in (
        (1, "failed: ActorDied: x\nlogs: y", "exit code 1: failed: ActorDied: x | logs: y"),
        (-signal.SIGKILL, "", "exit code -9: "),
    ):
        assert process.check_end(process.End(code, [], output)) == [violation]


def test_runs_follow_from_the_seed(tool: Any) -> None:
    options = tool.parse(["--seed", "3"])
    cases, again = ([tool.plan_case(options, number) for number in range(1, 61)] for _ in range(2))
    assert cases == again != [tool.plan_case(tool.parse(["--seed", "4"]), number) for number in range(1, 61)]
    assert {case.pipeline for case in cases} == {"on-policy", "async-partial", "recorded"}
    faults = [fault for case in cases for fault in case.faults]
    assert {fault.victim for fault in faults} == set(process.VICTIMS)
    assert {fault.moment for fault in faults} == set(process.MOMENTS) and len(faults) > 120
    assert {fault.signal for fault in faults} == {"KILL", "STOP"}
    assert {fault.victim for case in cases if case.pipeline == "recorded" for fault in case.faults} == {
        *tool.OF_RECORDED
    }


# A run without engines: every step takes the next four prompts, and a resume continues from the newest checkpoint; or,
# with a fault, a prompt later, with other weights, or never.
RUN = """
import json, os, pathlib, sys, time
fault, folder, data = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
is_disturbed = "undisturbed" not in str(folder)
prompts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
(folder / "rollouts").mkdir(parents=True, exist_ok=True)
(folder.parent.parent / "recorded").mkdir(exist_ok=True)
if fault == "hangs" and is_disturbed:
    time.sleep(60)
for step in range(4):
    attempt, offset = 1 + step // 2, int(fault == "loses" and is_disturbed and step > 1)
    if step:
        rows = []
        for group in range(4 * step - 4 + offset, 4 * step + offset):
            row = {"prompt": prompts[group % len(prompts)], "group_index": group, "weight_versions": [step - 1]}
            rows += [row | {"index": 2 * group + copy, "response_length": 1} for copy in (0, 1)]
        name = f"rollouts/step_{step:06d}.train.a{attempt}.jsonl"
        (folder / name).write_text("".join(json.dumps(row) + chr(10) for row in rows))
        checkpoint = folder / f"checkpoints/step_{step:06d}"
        checkpoint.mkdir(parents=True)
        rank = {"weights": f"{fault == 'differs' and is_disturbed}", "optimizer": "o", "rng": "r"}
        (checkpoint / "manifest.json").write_text(json.dumps({"hashes": {"trainers": [rank]}}))
    if fault == "skips" and is_disturbed and step == 2:
        continue
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": step, "attempt": attempt, "sync/version": step}) + chr(10))
"""
FAULTS = {
    "none": "",
    "loses": "1 prompts lost",
    "hangs": "a hang: it did not end in time",
    "differs": "the last checkpoint is not that of an undisturbed run",
    "skips": "start 2 begins after step 3, and only 1 are done",
}


@pytest.mark.parametrize(("fault", "said"), FAULTS.items())
def test_a_fault_of_a_run_fails_the_program(
    fault: str, said: str, tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    command = [sys.executable, "-c", RUN, fault]
    names = ("run", "data.jsonl")
    monkeypatch.setattr(tool, "command_of", lambda *given: [*command, *(str(given[-1] / name) for name in names)])
    monkeypatch.setattr(tool, "proves_little", lambda *_: [])  # no part is struck
    (tmp_path / "model").mkdir()  # none is needed
    flags = f"--runs 1 --steps 3 --limit {3 if fault == 'hangs' else 60} --pipelines on-policy --seed 18"
    code = tool.main(f"{flags} --work {tmp_path} --json {tmp_path / 'all.json'}".split())
    shown = "".join(capfd.readouterr())
    assert (code == 1) == bool(said) and said in shown, shown
    result = json.loads((tmp_path / "all.json").read_text())
    assert result["faults"] == 0 and result["failed"] == ([1] if said else []) and result["runs"] == 1
    assert ("  equal  " in shown) == (fault in ("none", "differs"))


def test_a_part_that_was_never_struck_is_missed(tool: Any) -> None:
    options = tool.parse(["--seed", "3", "--victims", "router", "driver"])
    cases = [tool.plan_case(options, number) for number in (1, 2, 4, 5)]
    outcome = tool.Outcome(cases[0], struck=[(cases[0].faults[0], "train after step 1")])
    missed = tool.proves_little(cases, [outcome])
    assert (
        missed and all("was struck" in text for text in missed) and tool.proves_little(cases, []) == ["no run was made"]
    )
    line = next(line for line in tool.table([outcome]).splitlines() if cases[0].faults[0].victim in line)
    assert line.count(" 1 |") >= 2


@pytest.mark.e2e
def test_a_run_of_real_parts_is_struck(tool: Any, tmp_path: Path, capfd: Any) -> None:
    """Buffer, router, trainer and driver, while they work; more runs: docs/results/checks.md."""
    flags = "--runs 1 --seed 30 --pipelines async-partial --max-faults 4 --steps 5"
    flags += " --victims buffer router trainer driver --moments generate train push save"
    code = tool.main(f"{flags} --work {tmp_path} --json {tmp_path / 'all.json'} --keep".split())
    assert code == 0, "".join(capfd.readouterr())[-3000:]
    result = json.loads((tmp_path / "all.json").read_text())
    assert set(result["by_victim"]) == {"buffer", "router", "trainer", "driver"} and result["faults"] == 4
