"""Signals and names of the starters of several nodes, with stand-ins for Ray, ssh and Slurm: no cluster is started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTERS = Path(__file__).parents[2] / "scripts" / "cluster"
# The head is there a moment after its start.
RAY = """#!/bin/bash
case " $* " in *" --head "*) sleep 0.5 ;; esac
echo $$ >"$NOTES/ray-$$"
trap 'exit 0' TERM
while :; do sleep 0.05; done
"""
# Counts the nodes, which are there as soon as each has begun.
PYTHON = """#!/bin/bash
ls "$NOTES" | grep -c ray-
"""
SSH = """#!/bin/bash
ls "$NOTES" | grep -q ray- || { echo "started before the head answers" >&2; exit 1; }
echo $$ >"$NOTES/ssh"
exec bash -c "${@: -1}"
"""
# Says how many signals it hears, and which nodes and connections live half a second after the first.
COMMAND = """
import os, signal, sys, time
from pathlib import Path
heard, notes = [], Path(os.environ["NOTES"])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: heard.append(time.monotonic()))
(notes / "runs").touch()
while not heard or time.monotonic() < heard[0] + 0.5:
    time.sleep(0.02)
lives = [Path(f"/proc/{file.read_text().strip()}").exists() for file in notes.iterdir() if file.name != "runs"]
print("heard", len(heard), "alive", lives, flush=True)
sys.exit(7)
"""
SRUN = """#!/bin/bash
case " $* " in
*" hostname "*) echo 10.0.0.1 ;;
*" kill "*) touch "$NOTES/told"; exit 1 ;;
*) until [ "$1" = -- ]; do shift; done; shift; "$@" ;;
esac
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Variables with which the starters find the stand-ins; notes lie in NOTES."""
    programs = {"ray": RAY, "python": PYTHON, "ssh": SSH, "srun": SRUN, "scontrol": "#!/bin/bash\necho node1\n"}
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "notes").mkdir()
    own = {"FUSIONRL_VENV": str(tmp_path / "venv"), "NOTES": str(tmp_path / "notes"), "HEAD_ADDRESS": "10.0.0.1"}
    return os.environ | own | {"FORWARD": "NOTES"}


def _begun(words: list[str], environ: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """A starter in a process group of its own, as a terminal has it, whose command runs."""
    started = subprocess.Popen(
        ["bash", *words],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (Path(environ["NOTES"]) / "runs").exists() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return started


@pytest.mark.parametrize("to_all", [True, False])
def test_an_interrupt_is_heard_once_and_by_the_command_alone(
    to_all: bool, environ: dict[str, str], tmp_path: Path
) -> None:
    words = [str(STARTERS / "ssh.sh"), "node2", "--", sys.executable, "-c", COMMAND]
    started = _begun(words, environ, tmp_path)
    (os.killpg if to_all else os.kill)(started.pid, signal.SIGINT)
    output = started.communicate(timeout=60)[0]
    assert "heard 1 alive [True, True, True]" in output, output
    assert started.returncode == 7, output


def test_any_name_of_a_host_will_do_once(environ: dict[str, str], tmp_path: Path) -> None:
    def output(*hosts: str) -> tuple[int, str]:
        words = ["bash", str(STARTERS / "ssh.sh"), *hosts, "--", "bash", "-c", "echo it runs"]
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr

    assert output("node2", "node3", "node2") == (
        2,
        "ssh.sh: error: host node2 is given twice: a machine is one node; name each once\n",
    )
    code, said = output("head")
    assert code == 0 and "it runs" in said, said


def test_a_signal_that_reaches_nobody_keeps_the_exit_status(environ: dict[str, str], tmp_path: Path) -> None:
    """The command ends while Slurm's signal for it is on its way."""
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    job["SLURM_SUBMIT_DIR"] = str(tmp_path)
    command = 'touch "$NOTES/runs"; until [ -e "$NOTES/told" ]; do sleep 0.05; done; exit 9'
    started = _begun([str(STARTERS / "slurm.sh"), "bash", "-c", command], environ | job, tmp_path)
    os.kill(started.pid, signal.SIGUSR1)
    assert started.communicate(timeout=60)[0] == ""
    assert started.returncode == 9
