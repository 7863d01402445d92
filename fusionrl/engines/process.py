"""Child processes that never outlive their starter, and ports that are theirs.

A port found free by bind-and-close can be taken before the server binds it, ten seconds later. A `PortReservation`
keeps the socket bound (not listening, SO_REUSEADDR set) until the server answers: Linux then gives that port to no
process that asks for any, refuses it to those that bind it without SO_REUSEADDR, and lets the server, which sets it,
bind and listen. If a stranger names this very port with SO_REUSEADDR, `start_on_free_ports` tries others.

On a CPU a server's start is mostly imports: 6 s of a core. The run's nursery (`fusionrl.base.nursery`) makes
them once; server and minder are then forks of it (`fork_server`), and behave as other children.
"""

import functools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from fusionrl.base.memory_groups import MemoryKills
from fusionrl.base.nursery_client import FOLDER_VARIABLE, ask
from fusionrl.base.process import replace_title, set_title, signal_name
from fusionrl.base.wording import LOG_END

logger = logging.getLogger(__name__)

NURSERY_SOCKET = "engine"  # the name of the branch's socket in the nursery's folder
SERVER_MODULE = "fusionrl.engines.launch_server"
_CONTROL, _STATUS = 3, 4  # descriptors of a server's minder, after standard input, output and error
_MINDER = Path(__file__).with_name("process_minder.py")
_ADDRESS_IN_USE = re.compile(r"address already in use|EADDRINUSE|\b(errno|os error) 98\b", re.IGNORECASE)

# A process that forks without exec (multiprocessing's "fork") would keep our ends of the socket pairs open
# and so keep the children alive after our end: the forked copy closes them first.
_starter_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_starter_ends() -> None:
    for end in list(_starter_ends):
        end.close()


os.register_at_fork(after_in_child=_close_starter_ends)


def kill_group(pgid: int) -> None:
    """SIGKILL to a process group, which may be empty."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


class ChildExited(RuntimeError):
    """A child ended while something was expected of it; the message has its status and the end of its log."""

    def __init__(self, message: str, log: str = "") -> None:  # pickled, as Ray does, with its message alone
        super().__init__(message)
        self.address_in_use = bool(_ADDRESS_IN_USE.search(log))


class ChildProcess:
    """A command in a session of its own that dies, with all its descendants, when this object's process does.

    The command runs under `process_minder.py`, which see. Its standard output and error are appended to `log_path`;
    its standard input is empty, or has a secret. Collecting this object ends the command too.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: str | os.PathLike[str],
        *,
        env: Mapping[str, str] | None = None,
        secret: str | None = None,
    ) -> None:
        """Start `command`. Raises OSError when the log cannot be opened; `alive` tells the rest.

        The command reads `secret` from its standard input, and its log has *** in its place.
        """
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ if env is None else env)
        self._memory_kills = MemoryKills()
        ours, theirs = socket.socketpair()
        try:
            with open(self.log_path, "ab") as log:
                self._log_start = log.tell()  # what an earlier start wrote is not this child's log
                minder = fork_server(command, theirs, log, environment)
                self._minder: ForkedMinder | subprocess.Popen[bytes] = minder or subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_MINDER), str(theirs.fileno()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        secret_bytes = (secret or "").encode()
        try:
            ours.sendall(b"%d\n" % len(secret_bytes) + secret_bytes)
        except OSError:
            pass  # the minder is dead already, which `alive` tells
        self._ours = ours
        _starter_ends.add(ours)
        with ours.makefile("rb") as stream:
            line = stream.readline()
        self.pid = int(line) if line.strip() else self._minder.pid
        """Pid of the command itself (of the minder if the command could not be started)."""

    def alive(self) -> bool:
        return self._poll() is None

    def _poll(self) -> int | None:
        """Exit code of the minder, which is the command's; None while it runs."""
        if self._minder.returncode is None:
            try:
                ended = os.waitid(os.P_PID, self._minder.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                ended = None  # another thread has just collected it
            if ended is not None:
                # A minder that was itself killed leaves its group behind. As long as it is not collected, its
                # process group's number cannot be another's.
                kill_group(self._minder.pid)
        return self._minder.poll()

    def wait_exit(self, timeout_s: float) -> bool:
        """Return whether the command has ended within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def exit_status(self) -> str:
        """The end of the command in words: "running", "exit code 1" or "killed by SIGKILL"."""
        code = self._poll()
        if code is None:
            return "running"
        return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"

    def log_tail(self, num_lines: int = 40) -> str:
        """The last `num_lines` lines that this child wrote (at most the last 64 KiB)."""
        with open(self.log_path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            start = self._log_start if self._log_start <= size else 0  # it was shortened: --max-log-mb
            log.seek(max(start, size - 65536))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    def died(self, purpose: str) -> ChildExited:
        """The error to raise when the child is found dead while `purpose` was expected of it."""
        tail = self.log_tail()
        end = LOG_END + tail if tail.strip() else "it is empty"
        status, kills = self.exit_status(), self._memory_kills.sentence()
        ended = f"{purpose}: the process ended ({status}). " + (f"{kills}. " if kills else "")
        # A backtrace may separate the cause, such as a taken port, from the end that the message shows.
        return ChildExited(f"{ended}Its log is {self.log_path}; {end}", self.log_tail(10_000))

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float, purpose: str) -> None:
        """Call `predicate` until it is true.

        Raises `ChildExited` (a RuntimeError) as soon as the child has ended and RuntimeError after
        `timeout_s` seconds; both show the end of the log and name its file.
        """
        deadline = time.monotonic() + timeout_s
        while not predicate():
            if not self.alive():
                raise self.died(purpose)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{purpose}: not there after {timeout_s:.0f} s. The log is {self.log_path}; "
                    f"{LOG_END}{self.log_tail()}"
                )
            time.sleep(0.05)

    def terminate(self, timeout_s: float = 10.0) -> None:
        """SIGTERM to the command; after `timeout_s` seconds, at once for 0, SIGKILL to it and all its descendants.
        Idempotent."""
        if timeout_s > 0 and self.alive():
            try:
                # The minder has not collected the command, so the pid it signals cannot be another process's.
                self._ours.sendall(b"T")
                self.wait_exit(timeout_s)
            except OSError:
                pass  # the minder ended at this moment, or an earlier call has closed the socket
        self._ours.close()  # the minder kills what is left and ends
        if not self.wait_exit(15.0):
            self._minder.kill()
            self.wait_exit(15.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


class PortReservation:
    """A TCP port kept for a server that is about to bind it; see the module's docstring."""

    def __init__(self, host: str, port: int = 0, *, flag: str = "port") -> None:
        """Reserve `port`, or any free one for 0. Raises ValueError when a fixed port is in use."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ValueError(
                f"{flag}: cannot bind {host}:{port}: {error.strerror}; leave {flag} out to get a free port"
            ) from error
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Let go of the port; a server that has bound it meanwhile keeps it."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def start_on_free_ports(
    hosts: Sequence[str],
    start: Callable[[list[int]], ChildProcess],
    wait_ready: Callable[[ChildProcess], None],
) -> ChildProcess:
    """Start a server on reserved ports, one of each of `hosts`, and wait until it answers.

    A start that fails because one of the ports was taken all the same is repeated on other ports, up to three times in
    all; any other failure is raised at once, the child ended.
    """
    for is_last in (False, False, True):
        reservations = [PortReservation(host) for host in hosts]
        try:
            child = start([reservation.port for reservation in reservations])
            try:
                wait_ready(child)
                return child
            except BaseException as error:
                child.terminate(timeout_s=2.0)
                taken = isinstance(error, ChildExited) and error.address_in_use
                if not taken or is_last:
                    raise
        finally:
            for reservation in reservations:
                reservation.release()
    raise AssertionError("unreachable: the last attempt returns or raises")


def base_url(host: str, port: int) -> str:
    """`http://host:port`, with the brackets that an IPv6 address needs."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def shared_memory_of(pid: int) -> set[Path]:
    """SGLang's files in /dev/shm that the process or a descendant of it has mapped."""
    import psutil

    files = set()
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2]
                if path.startswith(("sgl_", "sglang_")) and not path.endswith("(deleted)"):
                    files.add(Path("/dev/shm", path))
    except (psutil.Error, OSError):
        pass  # a process ended meanwhile, or this system has no /proc: what is not found is not cleaned up
    return files


# ---------------------------------------------------------------- servers that are forks of the nursery
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


def fork_server(
    command: Sequence[str], control: socket.socket, log: BinaryIO, env: Mapping[str, str]
) -> ForkedMinder | None:
    """Let the nursery start `command`, if it is SGLang's server, under a minder; None: it cannot."""
    folder, key = os.environ.get(FOLDER_VARIABLE), os.environ.get("RAY_AUTH_TOKEN")
    if not folder or not key or list(command[1:3]) != ["-m", SERVER_MODULE]:
        return None
    ours, theirs = os.pipe()
    try:
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), log.fileno(), log.fileno(), control.fileno(), theirs]
            pid = ask(str(Path(folder, NURSERY_SOCKET)), key, command[3:], env, files, command[0])
    except OSError as error:
        logger.info("an engine's server is started by itself: %s", error)
        os.close(ours)
        return None
    finally:
        os.close(theirs)
    return ForkedMinder(pid, ours)


def mind_server(arguments: list[str]) -> None:
    """Start SGLang's server with these arguments as a fork, and mind it. Called in a fork of the nursery."""
    set_title(f"fusionrl.engines.process_minder {SERVER_MODULE}")

    def report(status: int) -> None:
        with suppress(OSError):  # the starter is gone
            os.write(_STATUS, b"%d" % status)

    this = os.getpid()
    try:
        from fusionrl.engines import process_minder

        process_minder.mind(socket.socket(fileno=_CONTROL), functools.partial(_fork, arguments), SERVER_MODULE, report)
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
    from fusionrl.engines.process_minder import end_with_parent

    end_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stdin, 0)
    for number in (1, 2) if output is not None else ():
        os.dup2(output or 0, number)
    os.closerange(_CONTROL, 1024)
    set_title(" ".join([SERVER_MODULE, *arguments]))
    sys.argv = [SERVER_MODULE, *arguments]

    import setproctitle
    import torch

    setproctitle.setproctitle = replace_title  # SGLang's schedulers and detokenizers say what they are
    from fusionrl.base.nursery import finish
    from fusionrl.engines.launch_server import main

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it was imported under another value
    finish(main, arguments)
