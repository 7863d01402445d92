"""`run_python` and `run_python_sync`: start the launcher, feed it, read what comes, and clean up."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import itertools
import marshal
import os
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fusionrl.base.process import signal_name
from fusionrl.sandbox.limits import Limits, MemoryCgroup, SandboxError, SandboxResult, writable_parent

if TYPE_CHECKING:
    from fusionrl.sandbox.launcher.main import Report

_START_LAUNCHER = "import sys; sys.path.append(sys.argv[1]); from launcher.main import main; main()"
_FOLDER = str(Path(__file__).parent)
_START_S = 60.0  # beyond the wall time, for the launcher of a machine under load to start and to report
WEAK_HINT = (
    "the kernel grants no namespaces, so untrusted code would run in the weak mode of the sandbox"
    " (docs/guides/sandbox.md says what that lacks). Run as root outside of a container, or allow"
    " user namespaces (sysctl user.max_user_namespaces,"
    " docker run --security-opt seccomp=unconfined), or accept the weak mode with --allow-weak-sandbox"
)

_allow_weak = False


def allow_weak(allowed: bool) -> None:
    """Say whether runs of this process may fall back to the weak mode where the kernel grants no namespaces."""
    global _allow_weak
    _allow_weak = allowed


async def run_python(code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """Run `code` as a script, with `stdin` as its input; cancelling the call ends the run.

    A few runs a core run at a time and further calls wait; the wall time counts from a run's own start. Raises
    SandboxError if the sandbox itself could not be set up, or would be weak and `allow_weak` was not called.
    """
    run = Run(code, stdin, limits or Limits())
    try:
        return await asyncio.get_running_loop().run_in_executor(_pool(), run.result)
    except asyncio.CancelledError:
        run.cancel()
        raise


def run_python_sync(
    code: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    answer_bytes: int = 0,
    descriptors: Sequence[int] = (),
) -> SandboxResult:
    """As `run_python`, from any thread.

    answer_bytes  if positive, the code may write as many bytes to descriptor 3, apart from its output
    descriptors   open descriptors that become 4, 5, … of the code (with `answer_bytes`, else 3, 4, …)
    """
    return Run(code, stdin, limits or Limits(), answer_bytes, descriptors).result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for runs. More at once would only turn waiting into wall times that run out."""
    return ThreadPoolExecutor(max(16, 4 * (os.cpu_count() or 1)), "sandbox")


class _Stream:
    """Keeps the first `limit` bytes of a pipe and counts the others."""

    def __init__(self, limit: int) -> None:
        self.limit, self.kept, self.total = limit, bytearray(), 0

    def add(self, data: bytes) -> None:
        self.kept += data[: self.limit - len(self.kept)]
        self.total += len(data)

    @property
    def cut(self) -> bool:
        return self.total > self.limit

    def text(self) -> str:
        text = self.kept.decode("utf-8", "replace")
        return text + f"\n[output cut: {self.limit} of {self.total} bytes are shown]" if self.cut else text


class Run:
    """One run, which another thread may cancel."""

    def __init__(
        self, code: str, stdin: str, limits: Limits, answer_bytes: int = 0, descriptors: Sequence[int] = ()
    ) -> None:
        self.code, self.stdin, self.limits = code, stdin, limits
        self._answer_bytes, self._descriptors = answer_bytes, descriptors
        self._lock = threading.Lock()
        self._cancelled = False
        self._process: subprocess.Popen[bytes] | None = None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()  # the launcher takes everything with it

    def result(self, on_start: Callable[[], object] | None = None) -> SandboxResult:
        """Start the launcher in a folder of its own, wait for its end and its report, and remove the folder.

        on_start  called once when the launcher has the descriptors, or will never have them

        Raises SandboxError if no report came, it says that the code could not be started, or the machine lacks the
        means for a run: space for its folder, descriptors, processes.
        """
        with contextlib.ExitStack() as stack:
            if on_start is not None:
                stack.callback(on_start)
            try:
                return self._result(stack)
            except OSError as error:
                raise SandboxError(f"the sandbox could not be set up: {error}") from error

    def _result(self, starting: contextlib.ExitStack) -> SandboxResult:
        start = time.monotonic()
        read_ends: list[int] = []
        write_ends: list[int] = []
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="sandbox-")
            stack.callback(_remove, folder)
            cgroup = _make_cgroup(self.limits)
            if cgroup is not None:
                stack.callback(cgroup.remove)
            stack.callback(lambda: list(map(os.close, (*read_ends, *write_ends))))
            for _ in range(2 if self._answer_bytes else 1):
                read_end, write_end = os.pipe()
                read_ends.append(read_end)
                write_ends.append(write_end)
            passed = [*write_ends, *self._descriptors]
            with self._lock:
                if self._cancelled:
                    raise SandboxError("the run was cancelled")
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _START_LAUNCHER, _FOLDER, *map(str, passed)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=passed,
                    cwd=folder,
                    env={"LANG": "C.UTF-8"},
                    start_new_session=True,
                )
            starting.close()
            while write_ends:
                os.close(write_ends.pop())
            if cgroup is not None and not cgroup.add(self._process.pid):
                cgroup = None  # the watch bounds this run
            request: dict[str, object] = {"code": self.code, "stdin": self.stdin, "folder": folder}
            request |= {"limits": asdict(self.limits), "allow_weak": _allow_weak}
            request["oom_events"] = cgroup and str(cgroup.oom_events)
            streams = self._communicate(self._process, request, read_ends)
            report = self._read_report(streams)
            was_full = cgroup is not None and cgroup.was_full()
            return self._make_result(report, streams, "cgroup" if cgroup else "watch", was_full, start)

    def _communicate(
        self, process: subprocess.Popen[bytes], request: dict[str, object], read_ends: list[int]
    ) -> list[_Stream]:
        assert process.stdin and process.stdout and process.stderr
        limit = self.limits.output_bytes
        streams = [_Stream(limit), _Stream(limit), _Stream(1 << 16), _Stream(self._answer_bytes)]
        deadline = time.monotonic() + self.limits.wall_s + _START_S
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it died: its errors tell more
                pipe.write(marshal.dumps(request))
            with selectors.DefaultSelector() as selector:
                sources = (process.stdout.fileno(), process.stderr.fileno(), *read_ends)
                for source, stream in zip(sources, streams, strict=False):
                    selector.register(source, selectors.EVENT_READ, stream)
                while selector.get_map():
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        break
                    for key, _ in selector.select(remaining):
                        data = os.read(key.fd, 1 << 16)
                        if data:
                            key.data.add(data)
                        else:
                            selector.unregister(key.fd)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.poll() is None and not streams[2].total:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()
        return streams

    def _read_report(self, streams: list[_Stream]) -> Report:
        stderr, report = streams[1], streams[2]
        if not report.total:
            reason = "the run was cancelled" if self._cancelled else stderr.text().strip() or "its launcher was killed"
            raise SandboxError(f"the sandbox gave no report: {reason}")
        try:
            answer = ast.literal_eval(report.kept.decode())
        except (ValueError, SyntaxError) as error:
            raise SandboxError("the sandbox gave a report that is cut off: its launcher was killed") from error
        if "error" in answer:
            weak = "no namespaces" in answer["error"]
            raise SandboxError(WEAK_HINT if weak else f"the sandbox could not start the code: {answer['error']}")
        return answer

    def _make_result(
        self, report: Report, streams: list[_Stream], memory: str, was_full: bool, start: float
    ) -> SandboxResult:
        stdout, stderr, _, answer = streams
        code, killed_by = report["exit_code"], report["over"]
        if code is not None and code < 0:
            killed_by = "CPU time" if -code == signal.SIGXCPU else signal_name(-code)
        if was_full and killed_by == "SIGKILL":
            killed_by = "memory"
        return SandboxResult(
            stdout=stdout.text(),
            stderr=stderr.text(),
            answer=bytes(answer.kept),
            exit_code=code,
            timed_out=report["over"] == "wall time",
            killed_by=killed_by,
            stdout_cut=stdout.cut,
            stderr_cut=stderr.cut,
            answer_cut=answer.cut,
            wall_s=time.monotonic() - start,
            mode="namespaces" if report["isolated"] else "weak",
            landlock=report["landlock"],
            memory=memory,
        )


def _make_cgroup(limits: Limits) -> MemoryCgroup | None:
    try:
        parent = writable_parent() if limits.cgroup else None
        return MemoryCgroup(parent, limits.memory_bytes) if parent is not None else None
    except OSError:
        return None  # cgroups ran out, or the right was taken away: the watch bounds this run


def _remove(folder: str) -> None:
    """Remove a run's folder whatever the code left in it: folders without rights, or nested beyond any path's length.

    Each subfolder moves up into `folder` before its parent is removed, so depth costs neither a stack nor descriptors.
    What cannot be removed stays; this never raises OSError.
    """
    with contextlib.suppress(OSError):
        top = _open_folder(folder, None)
        try:
            prefix, numbers = os.urandom(8).hex(), itertools.count()  # a name that the code cannot have taken
            waiting = _empty(top, top, prefix, numbers)
            while waiting:
                name = waiting.pop()
                with contextlib.suppress(OSError):
                    place = _open_folder(name, top)
                    try:
                        waiting += _empty(place, top, prefix, numbers)
                    finally:
                        os.close(place)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _open_folder(name: str, parent: int | None) -> int:
    """Open a folder, refusing a link, and take every right to it."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)


def _empty(place: int, top: int, prefix: str, numbers: Iterator[int]) -> list[str]:
    """Remove the files of the folder `place` and move its folders into `top`; return their names there."""
    names = []
    for name in os.listdir(place):
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=place)
                continue
            os.close(_open_folder(name, place))  # to move a folder its own ".." is written
            moved = f"{prefix}-{next(numbers)}"
            os.rename(name, moved, src_dir_fd=place, dst_dir_fd=top)
            names.append(moved)
    return names


def probe(limits: Limits | None = None) -> str:
    """Run a small program, and return the mode that it ran in, in words, and what that lacks of the best one.

    Raises SandboxError, with a cure, if programs cannot be started here, or only in the weak mode and that is not
    allowed.
    """
    # Twice 21 is worked out by the program: an interpreter that starts and does nothing is not enough.
    result = run_python_sync("print(int(input()) * 2)", stdin="21", limits=limits or Limits(wall_s=30.0))
    if not result.ok or result.stdout != "42\n":
        end = result.killed_by or f"exit code {result.exit_code}"
        raise SandboxError(f"the sandbox cannot run a program on this machine ({end}): {result.stderr[-2000:].strip()}")
    lacks = []
    if result.mode == "weak":
        lacks.append("other processes and the network are kept out by seccomp and Landlock alone")
        lacks.append("what a program writes to its folder is measured, and not bounded beforehand")
        if not result.landlock:
            lacks.append("no Landlock: it reads and writes every file that its user may")
        if result.landlock < 6 and os.geteuid() != 0:
            lacks.append("it can signal other processes of its user, this run's included")
    if result.memory == "watch":
        lacks.append("memory of all processes together is looked at every 0.05 s, and can be exceeded between")
    hidden = f", Landlock {result.landlock}" if result.landlock else ""
    text = f"{result.mode}, seccomp{hidden}, memory by {result.memory}"
    return f"{text}; lacks: {'; '.join(lacks)}" if lacks else text
