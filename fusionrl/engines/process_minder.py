"""Run one command and end it, with all its descendants, the moment the starter of this program is gone.

`python -I -S process_minder.py FD COMMAND...`, started by `process.ChildProcess`. FD is one end of a socket pair
whose other end only the starter holds: end-of-file means that it ended, in whatever way. PR_SET_PDEATHSIG would follow
the *thread* that started the child, and no grandchild inherits it. Importing the standard library alone, this program
starts in about 30 ms.

The starter writes a line, the length of a secret (0: none), and the secret. The command reads it from its standard
input; its output has *** in its place. The minder writes the command's pid as a line, sends it SIGTERM for a byte `T`
from the starter, and ends as the command ended, with the same exit code or by the same signal.
"""

import ctypes
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

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
    descendants, stack = [], [os.getpid()]
    while stack:
        for pid in children.get(stack.pop(), ()):
            descendants.append(pid)
            stack.append(pid)
    return descendants


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
    child_status = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return child_status
        if pid == 0:
            return child_status
        if pid == child:
            child_status = status


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


class _Output:
    """The command's output on its way to this program's own, with *** in place of the secret."""

    _HIDDEN = b"***"

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.pipe, self.theirs = os.pipe()
        os.set_blocking(self.pipe, False)
        self._held = b""  # an end of what was read that may be the secret's beginning

    def pump(self) -> bool:
        """Write what is there. False when no process has the pipe any more."""
        while True:
            try:
                part = os.read(self.pipe, 65536)
            except BlockingIOError:
                return True
            text = (self._held + part).replace(self._secret, self._HIDDEN)
            keep = 0
            if part:
                longest = min(len(self._secret) - 1, len(text))
                keep = next((n for n in range(longest, 0, -1) if text.endswith(self._secret[:n])), 0)
            self._held = text[len(text) - keep :]
            _write_all(text[: len(text) - keep])
            if not part:
                return False


def _write_all(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(1, data) :]
        except OSError:
            return  # a full disk must not end the command, which would survive the same error itself


def _read_secret(starter: socket.socket) -> bytes:
    length = b""
    while not length.endswith(b"\n"):
        part = starter.recv(1)
        if not part:
            os._exit(0)  # the starter is gone already
        length += part
    secret = b""
    while len(secret) < int(length):
        part = starter.recv(int(length) - len(secret))
        if not part:
            os._exit(0)
        secret += part
    return secret


def end_with_parent() -> None:
    """Let this process be killed when its parent, or the thread that started it, ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def mind(
    starter: socket.socket, start: Callable[[int, int | None], int], name: str, report: Callable[[int], None]
) -> NoReturn:
    """Start the command `name`, then wait for its end or the starter's, and end as it ended.

    starter  this end of the socket pair
    start    starts the command, which reads from one descriptor and writes to another one, and returns its pid
    report   gets the wait status with which this program ends
    """
    starter.set_inheritable(False)
    secret = _read_secret(starter)
    output = _Output(secret) if secret else None
    if secret:
        stdin, write = os.pipe()
        os.write(write, secret)
        os.close(write)
    else:
        stdin = os.open(os.devnull, os.O_RDONLY)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        child = start(stdin, output.theirs if output else None)
        starter.sendall(f"{child}\n".encode())
    except OSError as error:
        print(f"cannot start {name}: {error}", file=sys.stderr, flush=True)
        _kill_descendants()
        report(127 << 8)
        os._exit(127)

    def end(status: int) -> NoReturn:
        _kill_descendants()
        if output:
            output.pump()
        report(status)
        _end_like(status)

    os.close(stdin)
    poller = select.poll()
    poller.register(starter, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    if output:
        os.close(output.theirs)
        poller.register(output.pipe, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if output and output.pipe in ready and not output.pump():
            poller.unregister(output.pipe)
        if wake_read in ready:
            os.read(wake_read, 4096)
            status = _reap(child)
            if status is not None:
                end(status)
        if starter.fileno() in ready:
            try:
                message = starter.recv(16)
            except ConnectionError:
                message = b""
            if not message:
                end(signal.SIGKILL)
            os.kill(child, signal.SIGTERM)


_kept = list[subprocess.Popen[bytes]]()


def start_command(command: Sequence[str], stdin: int, output: int | None) -> int:
    """Start it and return its pid."""
    process = subprocess.Popen(command, stdin=stdin, stdout=output, stderr=output, preexec_fn=end_with_parent)
    _kept.append(process)  # Popen.__del__ collects a command that has ended already: `_reap` would never see it
    return process.pid


def main() -> None:
    command = sys.argv[2:]
    starter = socket.socket(fileno=int(sys.argv[1]))
    mind(starter, functools.partial(start_command, command), command[0], lambda status: None)


if __name__ == "__main__":
    main()
