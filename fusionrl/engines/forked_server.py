"""An SGLang server as a fork of a process that has imported SGLang, under a minder that is a fork of it too.

On a CPU a server's start is mostly imports: 6 s of a core. The run's nursery (`fusionrl.base.nursery`) makes them once,
and begins before Ray is there. Server and minder behave as those of `process.ChildProcess` and
`process_minder.py`: the server dies with the process that requested it. Without a nursery, or if the nursery gives no
process, the server starts in the usual way.
"""

import functools
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fusionrl.base.nursery_client import FOLDER_VARIABLE, ask
from fusionrl.base.process import replace_title, set_title
from fusionrl.engines import process_minder

logger = logging.getLogger(__name__)

SOCKET = "engine"
"""The name of the branch's socket in the nursery's folder."""
MODULE = "fusionrl.engines.launch_server"
_CONTROL, _STATUS = 3, 4  # after standard input, output and error


class ForkedMinder:
    """A minder that is not a child of this process, with the part of `subprocess.Popen` that `ChildProcess` uses."""

    def __init__(self, pid: int, status: int) -> None:
        """`status`: the end of a pipe on which the minder says with which status it ends."""
        self.pid, self._status = pid, status
        self._lock = threading.Lock()  # an engine's actor has several threads, which wait for the same end
        self.returncode: int | None = None
        os.set_blocking(status, False)

    def poll(self) -> int | None:
        """Return the exit code, as `subprocess` has it; None while it runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    status = os.read(self._status, 16)
                except BlockingIOError:
                    return None
                os.close(self._status)
                self._status = -1
                if status:
                    self.returncode = os.waitstatus_to_exitcode(int(status))
                else:  # killed, and its group is left behind
                    self.returncode = -signal.SIGKILL
                    kill_group(self.pid)
            return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended at this moment
                os.kill(self.pid, signal.SIGKILL)

    def __del__(self) -> None:
        """Close the pipe if the exit code was never read."""
        if self._status >= 0:
            os.close(self._status)


def kill_group(pgid: int) -> None:
    """SIGKILL to a process group, which may be empty."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def fork_server(
    command: Sequence[str], control: socket.socket, log: BinaryIO, env: Mapping[str, str]
) -> ForkedMinder | None:
    """Let the nursery start `command`, if it is SGLang's server, under a minder; None: it cannot."""
    folder, key = os.environ.get(FOLDER_VARIABLE), os.environ.get("RAY_AUTH_TOKEN")
    if not folder or not key or list(command[1:3]) != ["-m", MODULE]:
        return None
    ours, theirs = os.pipe()
    try:
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), log.fileno(), log.fileno(), control.fileno(), theirs]
            pid = ask(str(Path(folder, SOCKET)), key, command[3:], env, files, command[0])
    except OSError as error:
        logger.info("an engine's server is started by itself: %s", error)
        os.close(ours)
        return None
    finally:
        os.close(theirs)
    return ForkedMinder(pid, ours)


def mind_server(arguments: list[str]) -> None:
    """Start SGLang's server with these arguments as a fork, and mind it. Called in a fork of the nursery."""
    set_title(f"fusionrl.engines.process_minder {MODULE}")

    def report(status: int) -> None:
        with suppress(OSError):  # the starter is gone
            os.write(_STATUS, b"%d" % status)

    this = os.getpid()
    try:
        process_minder.mind(socket.socket(fileno=_CONTROL), functools.partial(_fork, arguments), MODULE, report)
    except BaseException:  # whatever it is, it is reported
        if os.getpid() != this:
            raise  # the server's own process is minded, and has other files
        traceback.print_exc()
        sys.stderr.flush()
        report(1 << 8)
        os.killpg(0, signal.SIGKILL)  # this process too: the server has no minder any more


def _fork(arguments: list[str], stdin: int, output: int | None) -> int:
    if pid := os.fork():
        return pid
    process_minder.end_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stdin, 0)
    for number in (1, 2) if output is not None else ():
        os.dup2(output or 0, number)
    os.closerange(_CONTROL, 1024)
    set_title(" ".join([MODULE, *arguments]))
    sys.argv = [MODULE, *arguments]

    import setproctitle
    import torch

    setproctitle.setproctitle = replace_title  # SGLang's schedulers and detokenizers say what they are
    from fusionrl.base.nursery import finish
    from fusionrl.engines.launch_server import main

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it was imported under another value
    finish(main, arguments)
