"""The guard ends what carries the run's token, when the driver is killed and when it closes; nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from fusionrl.cluster.guard import Guard, carriers

SLEEPER = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]


def _wait_gone(token: str, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while carriers(token) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not carriers(token)


def test_close_sweeps_and_leaves_others_alone() -> None:
    other = subprocess.Popen(SLEEPER)
    guard = Guard()
    child = subprocess.Popen(SLEEPER, start_new_session=True)
    while child.pid not in carriers(guard.token):
        time.sleep(0.05)
    guard.close()
    assert child.wait(5) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_killed_driver_leaves_nothing() -> None:
    script = (
        "import subprocess, sys, time\n"
        "from fusionrl.cluster.guard import Guard\n"
        "guard = Guard()\n"
        f"subprocess.Popen({SLEEPER!r}, start_new_session=True)\n"
        "print(guard.token, flush=True)\n"
        "time.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)
    assert driver.stdout is not None
    token = driver.stdout.readline().strip()
    deadline = time.monotonic() + 10
    while not carriers(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert carriers(token)
    driver.kill()
    driver.wait()
    assert _wait_gone(token)
