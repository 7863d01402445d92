"""tools/chaos.py: which runs it makes, and how it sees a hang, a silent end and a process that stays."""

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


# A run in small: a child that stays (as an engine does), the lines of the console, and an end when the child is dead.
PROGRAM = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
for line in "starting Ray,step 0/3,generating,training,pushing weights,step 1/3,saving a checkpoint".split(","):
    print(line, flush=True)
    time.sleep(1.0 if "push" in line else 0.1)  # a moment that is seen on a machine that is busy
{after}
"""


def start(folder: Path, after: str = "") -> process.Attempt:
    return process.Attempt([sys.executable, "-c", PROGRAM.format(after=after)], folder / "output.txt")


def test_runs_follow_from_the_seed(tool: Any) -> None:
    options = tool.parse(["--seed", "3", "--max-kills", "2"])
    cases, again = ([tool.plan_case(options, number) for number in range(1, 41)] for _ in range(2))
    assert cases == again != [tool.plan_case(tool.parse(["--seed", "4"]), number) for number in range(1, 41)]
    assert len({(case.pipeline, case.kills[0].victim) for case in cases[:8]}) == 8  # both pipelines with each victim
    assert {kill.moment for case in cases for kill in case.kills} == set(tool.MOMENTS)
    assert {len(case.kills) for case in cases} == {1, 2}
    assert all(0 <= kill.after_step <= options.steps - 2 for case in cases for kill in case.kills)


def test_a_kill_comes_at_its_moment(tmp_path: Path) -> None:
    attempt = start(tmp_path, after="time.sleep(60)")
    end = attempt.run(process.Kill("driver", "push", 0, 0.0), 30, 30)
    assert end.state == "push after step 0" and end.code == -signal.SIGKILL and end.pid == attempt.process.pid
    assert end.seconds < 5
    (child,) = attempt.left(0.5)  # it is found though its parent is dead, and ended
    assert "time.sleep(60)" in child and attempt.left(5) == []
    assert process.check_end(end, "driver", False) == []
    # Any moment begins with the line of its step.
    end = start(tmp_path, after="time.sleep(60)").run(process.Kill("driver", "any", 1, 0.0), 30, 30)
    assert end.state in ("any after step 1", "checkpoint after step 1")


def test_a_victim_that_is_not_there_is_a_violation(tmp_path: Path) -> None:
    attempt = start(tmp_path, after="child.kill(); child.wait()")
    end = attempt.run(process.Kill("engine", "push", 0, 0.0), 30, 30)
    assert (end.state, end.code, end.missed) == (None, 0, "engine") and attempt.left(5) == []
    (violation,) = process.check_end(end, None, True)
    assert violation == "nothing was killed: no process of engine was found when its moment came"


def test_the_message_has_to_name_who_died() -> None:
    def said(code: int, output: str, victim: str | None) -> list[str]:
        return process.check_end(process.End(code, "any after step 1", 77, 1.0, output), victim, False)

    good = {
        "buffer": "failed: ActorDied: the Buffer died: its process 77 ended without an error of its own\nlogs: x",
        "trainer": "failed: ActorDied: trainer rank 1 died: its process 77 ended\nlogs: x",
        "engine": "failed: ChildExited: generation of engine 0 at http://x: the process ended (killed by SIGKILL)",
    }
    for victim, text in good.items():
        assert said(1, text, victim) == []
        other = good["buffer" if victim == "engine" else "engine"]
        assert "does not name the " + victim in said(1, other, victim)[0]
        assert "0 messages, not one" in said(1, "Killed\n", victim)[0]
        assert "2 messages, not one" in said(1, f"{text}\n{text}", victim)[0]
        assert "exit code 2 after" in said(2, text, victim)[0]
        assert said(1, f"Traceback (most recent call last):\n{text}", victim) == ["a traceback on the console"]
    assert "not name" in said(1, good["buffer"].replace("77", "78"), "buffer")[0]
    assert said(-9, "step 1/3\n", "driver") == []
    assert "a message of a driver" in said(-9, good["buffer"], "driver")[0]
    assert "though nothing was killed" in said(1, good["buffer"], None)[0]


# A run without engines: every step takes the next four prompts, and a resume goes on from the newest checkpoint; or,
# with a fault, a prompt later, or never.
RUN = """
import json, os, pathlib, sys, time
fault, folder, data = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
prompts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
checkpoints = sorted(folder.glob("checkpoints/*/manifest.json"))
attempt = 2 if "--resume" in sys.argv else 1
first = int(checkpoints[-1].parent.name[5:]) if checkpoints else 0
offset = 1 if fault == "loses" and attempt == 2 else 0
ends_at_once = fault == "ends at once"  # it shows its steps when it has done the last one
lines = []
if fault == "hangs" and attempt == 2:
    time.sleep(60)
(folder / "rollouts").mkdir(parents=True, exist_ok=True)
for step in range(first, 4):
    if step > first:
        rows = []
        for group in range(4 * step - 4 + offset, 4 * step + offset):
            version = max(0, step - 2)
            row = {"prompt": prompts[group % len(prompts)], "group_index": group, "weight_versions": [version]}
            rows += [row | {"index": 2 * group + copy, "response_length": 1} for copy in (0, 1)]
        name = f"rollouts/step_{step:06d}.train.a{attempt}.jsonl"
        (folder / name).write_text("".join(json.dumps(row) + chr(10) for row in rows))
    lines.append(json.dumps({"step": step, "attempt": attempt, "sync/version": step}) + chr(10))
    if step:
        (folder / f"checkpoints/step_{step:06d}").mkdir(parents=True, exist_ok=True)
        (folder / f"checkpoints/step_{step:06d}/manifest.json").touch()
    if ends_at_once and step < 3:
        continue
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write("".join(lines))
    lines.clear()
    print(f"step {step}/3", flush=True)
    if ends_at_once:
        os._exit(0)
    time.sleep(0.3)
"""


FAULTS = {"none": "", "loses": "1 prompts lost", "hangs": "no end 3 s after its start"}


@pytest.mark.parametrize(("fault", "said"), (FAULTS | {"ends at once": "in no run the driver was killed"}).items())
def test_a_fault_of_a_run_fails_the_program(
    fault: str, said: str, tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    command = [sys.executable, "-c", RUN, fault]
    names = ("run", "data.jsonl")
    monkeypatch.setattr(tool, "command_of", lambda *given: [*command, *(str(given[-1] / name) for name in names)])
    # The bound of one-step-off is 1. It is killed by its driver alone: there are no other processes.
    flags = f"--runs 1 --victims driver --moments any --max-kills 1 --steps 3 --limit {3 if fault == 'hangs' else 60}"
    (tmp_path / "model").mkdir()  # none is needed
    code = tool.main(f"{flags} --pipelines one-step-off --seed 18 --work {tmp_path}".split())
    shown = "".join(capfd.readouterr())
    assert (code == 1) == bool(said) and said in shown, shown
    num_kills = int(fault != "ends at once")
    assert f'"kills": {num_kills}, "kills_too_late": {1 - num_kills}' in shown
