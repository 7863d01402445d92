"""SIGUSR1 asks a process of a run for the stacks of its threads: they go to its standard error, which is its log.

Sent to the process's thread `stacks`, as `ask_for_stacks` does, the signal is answered with Python's lock. Sent to the
process (`kill -USR1`, or `is_forced`), the handler itself writes, in C: also where a library holds the lock, but other
threads may change the stacks meanwhile, and the process may crash.
"""

import ctypes
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
_STDERR = 2
_THREAD = "stacks"  # as the kernel knows it
_PR_SET_NAME = 15
# A young process may be a fork that is about to run another program. Until then it has its parent's handler; the
# signal would end the program.
_YOUNG_S = 5.0


def answer_with_stacks() -> None:
    """Let this process answer SIGUSR1 from now on. A log that is set up later gets them as well."""
    faulthandler.register(STACK_SIGNAL, file=_STDERR, all_threads=True)
    is_ready = threading.Event()
    threading.Thread(target=_answer, args=(is_ready,), name=_THREAD, daemon=True).start()
    is_ready.wait()


def _answer(is_ready: threading.Event) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _THREAD.encode(), 0, 0, 0)
    is_ready.set()
    while True:
        signal.sigwait({STACK_SIGNAL})
        faulthandler.dump_traceback(_STDERR, all_threads=True)


def answers_with_stacks(pid: int) -> bool:
    """Return whether a process of this machine has a handler for the signal: any other would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, or is another user's
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def ask_for_stacks(pid: int, *, is_forced: bool = False) -> bool:
    """Send the signal to a process that answers it. Returns whether it was sent: not to a young fork.

    is_forced  for a process that has not answered: it may hold Python's lock
    """
    if not answers_with_stacks(pid):
        return False
    try:
        thread = _thread_of(pid)
        if thread is None and _age_s(pid) < _YOUNG_S:
            return False
        if thread is None or is_forced:
            os.kill(pid, STACK_SIGNAL)
            return True
        return bool(ctypes.CDLL(None).tgkill(pid, thread, int(STACK_SIGNAL)) == 0)
    except OSError:  # it has ended meanwhile
        return False


def _thread_of(pid: int) -> int | None:
    """Return the id of the thread that answers; None where there is none, as in a process that was forked later."""
    for name in Path(f"/proc/{pid}/task").glob("*/comm"):
        if name.read_text().rstrip("\n") == _THREAD:
            return int(name.parent.name)
    return None


def _age_s(pid: int) -> float:
    """Return the seconds since a process started. Raises OSError if it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
