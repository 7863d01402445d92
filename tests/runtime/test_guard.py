"""The guard ends what carries the run's token, when the driver is killed and when it closes; nothing else."""

import signal
import subprocess
import sys
import time

from fusionrl.runtime.guard import Guard
from tests.own_process import carriers, lives, wait_until

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

# As a fork of the nursery that writes a title over its environment before the guard has looked.
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, time\n"
    f"child = subprocess.Popen({SLEEPER!r}, env={{}}, start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n",
]


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with process.stdout:
        return process.stdout.readline().strip()


def test_close_sweeps_and_leaves_others_alone() -> None:
    """A process that overwrites its environment is known all the same, and a child without a token by its parent."""
    other = subprocess.Popen(SLEEPER)
    guard = Guard()
    child = subprocess.Popen(SLEEPER, start_new_session=True)
    parent, titled = (subprocess.Popen(code, stdout=subprocess.PIPE, text=True) for code in (PARENT, TITLED))
    pid = int(first_line(parent))
    assert first_line(titled) == "titled"
    assert set(carriers(guard.token)) & {child.pid, parent.pid, titled.pid, pid, other.pid} == {child.pid, parent.pid}
    time.sleep(1.5)  # the guard looks twice a second
    parent.kill()
    parent.wait()
    guard.close()
    assert child.wait(5) == titled.wait(5) == -signal.SIGKILL
    wait_until(lambda: not lives(pid))
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_driver_that_is_killed_has_a_last_line() -> None:
    """Also one that the kernel kills as /dev/shm is full; a driver that ends by itself has said why."""
    driver = "import os, sys; from fusionrl.runtime.guard import Guard; guard = Guard(); "
    for end, said in (("os.kill(os.getpid(), 9)", True), ("guard.close()", False)):
        command = [sys.executable, "-c", driver + end]
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
        assert ("failed: the driver ended without a message of its own" in output) == said
