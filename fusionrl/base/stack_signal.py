"""SIGUSR1 asks a process of a run for the stacks of its threads: they go to its standard error, which is its log.

The stacks are written by the signal's handler itself, in C: also by a process that is blocked in a library and holds
Python's lock. A process that is stopped (SIGSTOP) writes them when it goes on.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
_STDERR = 2


def answer_with_stacks() -> None:
    """Let this process answer SIGUSR1 from now on. A log that is set up later gets them as well."""
    faulthandler.register(STACK_SIGNAL, file=_STDERR, all_threads=True)


def answers_with_stacks(pid: int) -> bool:
    """Return whether a process of this machine has a handler for the signal: any other would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, or is another user's
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def ask_for_stacks(pid: int) -> bool:
    """Send the signal to a process that answers it. Returns whether it was sent."""
    if not answers_with_stacks(pid):
        return False
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError:  # it has ended meanwhile
        return False
    return True
