"""The guard ends what carries the run's token, when the driver is killed and when it closes; nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from fusionrl.runtime.guard import Guard, carriers
from tests.own_process import lives, wait_until

SLEEPER = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]


# After a second it writes a title over its environment, as Ray's processes do.
TITLED = [
    sys.executable,
    "-c",
    "import ctypes, time\n"
    "time.sleep(1)\n"
    "fields = open('/proc/self/stat').read().rsplit(')', 1)[1].split()\n"
    "start, end = int(fields[47]), int(fields[48])\n"
    "ctypes.memset(start, 32, end - start - 1)\n"
    "print('titled', flush=True)\n"
    "time.sleep(60)\n",
]


def test_close_sweeps_and_leaves_others_alone() -> None:
    other = subprocess.Popen(SLEEPER)
    guard = Guard()
    child = subprocess.Popen(SLEEPER, start_new_session=True)
    wait_until(lambda: child.pid in carriers(guard.token))
    guard.close()
    assert child.wait(5) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_process_that_overwrites_its_environment_is_known_all_the_same() -> None:
    guard = Guard()
    child = subprocess.Popen(TITLED, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "titled\n"
    assert child.pid not in carriers(guard.token)
    guard.close()
    assert child.wait(5) == -signal.SIGKILL
    child.stdout.close()


def test_a_child_that_has_no_token_is_known_by_its_parent() -> None:
    """As a fork of the nursery that writes a title over its environment before the guard has looked."""
    script = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen({SLEEPER!r}, env={{}}, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    guard = Guard()
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert pid not in carriers(guard.token)
    time.sleep(1.5)  # the guard looks twice a second
    parent.kill()
    parent.wait()
    guard.close()
    wait_until(lambda: not lives(pid))
    parent.stdout.close()
