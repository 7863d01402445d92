"""Sets the limits of a run, starts the code, waits, ends everything that is left, and reports.

The request comes by marshal on standard input, the report goes as a Python literal to the descriptor named on the
command line; further descriptors on it become 3, 4, … of the code. Standard output and error are the untrusted code's.
A run starts an interpreter for this, so modules that take long to import (json, contextlib, signal) are not imported.

    launcher ── waits
      └ init ── process 1 of a new pid namespace: files, clock, watch, report; when it ends, the kernel kills the rest
          └ the code, in a session of its own, without privileges, behind a seccomp filter

Without namespaces, launcher and init are one process, a subreaper that kills its descendants.
"""

from __future__ import annotations

import _signal as signal  # without the enums of `signal`
import fcntl
import marshal
import os
import resource
import sys
import time

from . import seccomp, view, watch
from .seccomp import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    CannotStart,
    drop_capabilities,
    prctl,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypedDict

    class Request(TypedDict):
        """One run; `limits` are the fields of `sandbox.Limits`, `number` is set by the launcher."""

        code: str
        stdin: str
        folder: str
        limits: dict[str, Any]
        allow_weak: bool
        oom_events: str | None
        number: int

    class Report(TypedDict):
        """The end of a run that started."""

        exit_code: int | None
        over: str | None
        isolated: bool
        landlock: int

    class Failure(TypedDict):
        """The reason why a run could not start."""

        error: str


_KILL_S = 10.0  # a killed process is gone sooner, unless the kernel waits for a device
_HIGH = 64  # descriptors from here on are out of the way of those that the code gets


def main() -> None:
    """Read the request, run it, report."""
    report, descriptors = int(sys.argv[2]), [int(argument) for argument in sys.argv[3:]]
    for descriptor in (report, *descriptors):
        os.set_inheritable(descriptor, False)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request: Request = marshal.loads(sys.stdin.buffer.read())
    request["number"] = os.getpid()  # before a new pid namespace counts from 1
    try:
        namespaces = request["limits"]["namespaces"]
        isolated = namespaces and view.enter_namespaces()
        if namespaces and not isolated and not request["allow_weak"]:
            raise CannotStart("the kernel grants no namespaces")
        prctl(PR_SET_DUMPABLE, 0)  # the code cannot read this process's memory or trace it
        if isolated:
            init = os.fork()
            if init:
                for descriptor in (report, *descriptors):
                    os.close(descriptor)
                os.waitpid(init, 0)
                os._exit(0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        answer = _Run(request, isolated, descriptors).result()
    except (CannotStart, OSError) as error:
        answer = {"error": str(error)}
    _write_all(report, repr(answer).encode())
    os._exit(0)


class _Run:
    def __init__(self, request: Request, isolated: bool, descriptors: list[int]) -> None:
        self.limits = request["limits"]
        self.isolated = isolated
        self._request, self._descriptors = request, descriptors
        # As root one user a run, so that RLIMIT_NPROC counts this run's processes alone.
        user = 20_000 + request["number"] % 40_000
        self._new_user = user if os.geteuid() == 0 and _has_user(user) else None
        self._filter = seccomp.build_filter(os.uname().machine, allow_unix_sockets=isolated)
        self._num_tasks = self.limits["num_processes"]
        if not isolated and self._new_user is None:
            self._num_tasks += _tasks_of(os.geteuid())
        self._oom_events = os.open(request["oom_events"], os.O_RDONLY | os.O_CLOEXEC) if request["oom_events"] else None
        self._proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)  # a new root may have none, or one that is read-only
        self._proc = fcntl.fcntl(self._proc, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        self.home = request["folder"]
        self._rules = None if isolated else view.landlock_rules(self.home)
        if isolated:
            self.home = view.build_root(self.home, self.limits["disk_bytes"], self.limits["num_files"])
        if self._rules is not None:
            self._rules = fcntl.fcntl(self._rules, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        self._failed, self._has_started = b"", False
        self._put_code()

    def _put_code(self) -> None:
        main = os.path.join(self.home, "main.py")
        with open(main, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(self._request["code"])
        self._stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _write_all(self._stdin, self._request["stdin"].encode("utf-8", "replace"))
        os.lseek(self._stdin, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._stdin, fcntl.F_ADD_SEALS, seals)
        if self._new_user is not None:
            os.chown(self.home, self._new_user, self._new_user)
            os.chown(main, self._new_user, self._new_user)

    def result(self) -> Report | Failure:
        """Run the code, wait for its end or for a limit, kill what is left, and return the report."""
        # SIGTERM cancels the run. With namespaces the outer launcher gets it, and ends this process by its own end.
        self._awaited = {signal.SIGCHLD} if self.isolated else {signal.SIGCHLD, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._awaited)
        self._failure, write_end = os.pipe()
        os.set_blocking(self._failure, False)
        failure = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        os.close(write_end)
        deadline = time.monotonic() + self.limits["wall_s"]
        child = os.fork()
        if child == 0:
            try:
                self._become_code()
            except BaseException as error:  # whatever it was, the code has not started: the caller must know
                _write_all(failure, f"{type(error).__name__}: {error}".encode())
            os._exit(127)
        for descriptor in (failure, *self._descriptors):
            os.close(descriptor)
        status, over = self._wait(child, deadline)
        if not self.isolated and not _kill_descendants(time.monotonic() + _KILL_S):
            over = over or "a process that cannot be ended"
        self._look_for_start()
        if self._failed:
            return {"error": self._failed.decode("utf-8", "replace")}
        return {
            "exit_code": None if status is None else os.waitstatus_to_exitcode(status),
            "over": over,
            "isolated": self.isolated,
            "landlock": 0 if self._rules is None else view.landlock_version(),
        }

    def _look_for_start(self) -> None:
        """Set `_has_started` once the code's interpreter runs, and `_failed` to why it cannot."""
        try:
            while not self._has_started:
                text = os.read(self._failure, 1 << 12)
                self._failed += text
                self._has_started = not text  # the interpreter's start closes the other end
        except BlockingIOError:
            pass

    def _wait(self, child: int, deadline: float) -> tuple[int | None, str | None]:
        """(wait status of the code, None if it still runs; the limit that the run went over)."""
        next_look = time.monotonic() + watch.INTERVAL_S
        while True:
            now = time.monotonic()
            got = signal.sigtimedwait(self._awaited, max(0.0, min(deadline, next_look) - now))
            if got is not None and got.si_signo == signal.SIGTERM:
                return None, "SIGTERM to the sandbox"
            pid = -1
            while pid != 0:
                pid, ended = os.waitpid(-1, os.WNOHANG)  # the code itself is among them, so there is always a child
                if pid == child:
                    return ended, None
            now = time.monotonic()
            if now >= deadline:
                return None, "wall time"
            if now >= next_look:
                if over := self._over_total():
                    return None, over
                next_look = time.monotonic() + watch.INTERVAL_S

    def _over_total(self) -> str | None:
        """The limit of all processes together that the run is over."""
        most_bytes, most_files = self.limits["memory_bytes"], self.limits["num_files"] + 2
        disk, num_files = watch.disk_of(self.home, self.isolated, most_files)
        self._look_for_start()
        if not self.isolated and self._has_started:  # before its start it is as closed as this process
            disk += watch.unlinked_of(watch.descendants(os.getpid()), os.fstat(self._stdin).st_ino)
        if not self.isolated and (disk > self.limits["disk_bytes"] or num_files > most_files):
            return "disk"
        if self._oom_events is not None:
            if watch.was_full(os.pread(self._oom_events, 1 << 12, 0)):
                return "memory"
        else:
            pids = watch.descendants(os.getpid())
            if watch.memory_of(pids, most_bytes) + (disk if self.isolated else 0) > most_bytes:
                return "memory"
        return None

    # -------------------------------------------------------------------------------- in the child
    def _become_code(self) -> None:
        """Give up every privilege, set the limits and become the code's interpreter."""
        os.setsid()  # leave the launcher's process group: a kill of its own group hits no other process
        self._be_first_to_go()
        os.dup2(self._stdin, 0)
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in self._descriptors]
        for number, descriptor in enumerate(high, start=3):
            os.dup2(descriptor, number)
        self._become_user()
        if self._rules is not None:
            view.restrict(self._rules)
        os.chdir(self.home)
        self._set_limits()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        home = self.home
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment["TOKENIZERS_PARALLELISM"] = "false"
        # The sandbox limits the time that large integers take; Python's own limit would make right programs fail.
        arguments = [sys.executable, "-I", "-B", "-u", "-X", "int_max_str_digits=0", os.path.join(home, "main.py")]
        seccomp.install(self._filter)
        try:
            os.execve(sys.executable, arguments, environment)
        except PermissionError as error:
            raise CannotStart(
                f"the interpreter {sys.executable} cannot be read by user {os.geteuid()}; install it, or its virtual"
                f" environment, in a folder that every user can read (chmod o+rX, also of the folders above it)"
            ) from error

    def _be_first_to_go(self) -> None:
        """Short of memory, let the kernel kill the code and not the trainer."""
        try:
            score = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._proc)
            os.write(score, b"1000")
            os.close(score)
        except OSError:
            pass  # a container without a /proc that can be written to

    def _become_user(self) -> None:
        """Leave root for good, and every capability with it."""
        if (user := self._new_user) is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        drop_capabilities()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)

    def _set_limits(self) -> None:
        bounds = {
            resource.RLIMIT_CPU: self.limits["cpu_s"],
            resource.RLIMIT_AS: self.limits["memory_bytes"],
            resource.RLIMIT_FSIZE: self.limits["file_bytes"],
            resource.RLIMIT_NOFILE: self.limits["open_files"],
            resource.RLIMIT_NPROC: self._num_tasks,
            resource.RLIMIT_CORE: 0,
        }
        for name, value in bounds.items():
            hard = resource.getrlimit(name)[1]
            most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
            # A second between the CPU limits: at the soft one SIGXCPU says what happened, the hard one cannot be
            # ignored.
            resource.setrlimit(name, (min(value, most), min(value + (name == resource.RLIMIT_CPU), most)))


def _has_user(uid: int) -> bool:
    """Return whether this user namespace has the user; in a namespace of one user, root can become nobody else."""
    with open("/proc/self/uid_map") as file:
        return any(int(first) <= uid < int(first) + int(count) for first, _, count in map(str.split, file))


def _tasks_of(uid: int) -> int:
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass  # it ended
    return count


def _kill_descendants(deadline: float) -> bool:
    """Kill whatever descends from this subreaper, until nothing does; False: something was left at the deadline."""
    while True:
        for pid in watch.descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # it ended
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
