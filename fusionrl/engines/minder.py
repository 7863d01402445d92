"""Run one command and end it, with all its descendants, the moment the starter of this program is gone.

`python -I -S minder.py FD COMMAND...`, started by `process.ChildProcess`. FD is one end of a socket pair
whose other end only the starter holds: end-of-file on it means that the starter ended, in whatever way,
SIGKILL included. A program of its own rather than PR_SET_PDEATHSIG, which follows the *thread* that started
the child and is not inherited by grandchildren. It is a child subreaper, so a descendant that leaves the
process group or whose parent dies is still found. It imports the standard library alone: starting it takes
about 30 ms.

Protocol: the minder writes the command's pid as one line; a byte `T` from the starter sends the command
SIGTERM. The minder ends as the command ended, with the same exit code or by the same signal.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
    """Pids of all living descendants of this process, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The second field is the command in parentheses and may hold anything: read after
                # the last ")".
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, stack = [], [os.getpid()]
    while stack:
        for pid in children.get(stack.pop(), ()):
            found.append(pid)
            stack.append(pid)
    return found


def _kill_descendants(limit_s: float = 10.0) -> None:
    """SIGKILL every descendant until the kernel says that none is left.

    In a loop, as one may fork between the look and the kill. An orphan becomes this process's child, so "no
    children" means "no descendants"; a look at /proc would miss a process whose other threads are still
    ending.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _reap(child: int) -> int | None:
    """Collect every ended child; return the wait status of `child` if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _end_like(status: int) -> None:
    """End this process the way the command ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    """Start the command, then wait for its end or the starter's."""
    starter = socket.socket(fileno=int(sys.argv[1]))
    starter.set_inheritable(False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The command must not outlive the minder either; the minder has one thread, which ends with it.
    try:
        child = subprocess.Popen(
            sys.argv[2:],
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        ).pid
        starter.sendall(f"{child}\n".encode())
    except OSError as error:
        print(f"cannot start {sys.argv[2]}: {error}", file=sys.stderr, flush=True)
        _kill_descendants()
        os._exit(127)

    poller = select.poll()
    poller.register(starter, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if wake_read in ready:
            os.read(wake_read, 4096)
            status = _reap(child)
            if status is not None:
                _kill_descendants()
                _end_like(status)
        if starter.fileno() in ready:
            try:
                message = starter.recv(16)
            except ConnectionError:
                message = b""
            if not message:
                _kill_descendants()
                _end_like(signal.SIGKILL)
            os.kill(child, signal.SIGTERM)


if __name__ == "__main__":
    main()
