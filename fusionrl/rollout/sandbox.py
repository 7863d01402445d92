"""Untrusted Python in a process of its own, with bounds on what it may use and reach.

`run_python` for an event loop, `run_python_sync` for a grader. Nothing of the caller is inherited: no environment,
descriptor, working folder or process group, and when a run returns, every process that it started is gone.

Where the kernel grants namespaces (root, or unprivileged user namespaces) the code sees no network, no other
processes, and a read-only file system with one bounded folder to write to. Where it does not, sockets are refused by
seccomp, descendants are hunted down, and files are bounded one by one; a `SandboxResult` says which it was. This is no
virtual machine: a hole in the kernel is a hole here. Memory is bounded for each process, not for all together.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_START_S = 60.0  # beyond the wall time, for the launcher of a machine under load to start and to report


@dataclass(frozen=True)
class Limits:
    """Bounds of one run; bytes and seconds. `num_processes` counts threads too, as RLIMIT_NPROC does."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    output_bytes: int = 64 << 10
    """Of stdout and of stderr each; what is beyond is read and dropped."""
    file_bytes: int = 16 << 20
    """Of one file."""
    disk_bytes: int = 64 << 20
    """Of all files together; needs namespaces."""
    num_files: int = 1000
    """Files and folders in existence; needs namespaces."""
    open_files: int = 256
    num_processes: int = 64
    namespaces: bool = True
    """Off: do not even try them."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "namespaces" and value <= 0:
                raise ValueError(f"sandbox limit {name}={value}: it must be positive")


@dataclass(frozen=True)
class SandboxResult:
    """What a run left behind."""

    stdout: str
    stderr: str
    """Cut at `Limits.output_bytes`, the last line saying so."""
    exit_code: int | None
    """Minus the signal's number where a signal ended it; None where the wall time did."""
    timed_out: bool
    """The wall time ran out."""
    killed_by: str | None
    """"wall time", "CPU time" or the name of a signal; None where the code ended itself."""
    stdout_cut: bool
    stderr_cut: bool
    wall_s: float
    network: str
    """How it was kept out: "blocked by network namespace", "... seccomp", or, by Python alone, "... audit hook"."""
    processes: str
    """How none outlived the run: "pid namespace" or "subreaper" (code of the same user might kill that one first)."""
    files: str
    """How they were bounded: "read-only but for a bounded tmpfs" or "size of each file alone"."""

    @property
    def ok(self) -> bool:
        """Whether the code ended itself with exit code 0."""
        return self.exit_code == 0


async def run_python(code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """Run `code` as a script, with `stdin` as its input; cancelling the call ends the run.

    A few runs a core go on at a time and further calls wait; the wall time counts from a run's own start.

    Raises:
        RuntimeError: the sandbox itself could not be set up.
    """
    run = _Run(code, stdin, limits or Limits())
    try:
        return await asyncio.get_running_loop().run_in_executor(_pool(), run.result)
    except asyncio.CancelledError:
        run.cancel()
        raise


def run_python_sync(code: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """As `run_python`, from any thread."""
    return _Run(code, stdin, limits or Limits()).result()


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


class _Run:
    def __init__(self, code: str, stdin: str, limits: Limits) -> None:
        self.code, self.stdin, self.limits = code, stdin, limits
        self._lock = threading.Lock()
        self._cancelled = False
        self._process: subprocess.Popen[bytes] | None = None

    def cancel(self) -> None:
        """End the run, now or when its turn would come."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()  # the launcher takes everything with it

    def result(self) -> SandboxResult:
        """Start the launcher in a folder of its own, wait for its end and its report, and remove the folder.

        Raises:
            RuntimeError: no report came.
        """
        folder = tempfile.mkdtemp(prefix="sandbox-")
        read_end, write_end = os.pipe()
        try:
            with self._lock:
                if self._cancelled:
                    raise RuntimeError("the run was cancelled")
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_LAUNCHER), str(write_end)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(write_end,),
                    cwd=folder,
                    env={"LANG": "C.UTF-8"},
                    start_new_session=True,
                )
            os.close(write_end)
            write_end = -1
            return self._wait(self._process, read_end, folder)
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, process: subprocess.Popen[bytes], report_pipe: int, folder: str) -> SandboxResult:
        assert process.stdin and process.stdout and process.stderr
        limits, start = self.limits, time.monotonic()
        request = {"code": self.code, "stdin": self.stdin, "folder": folder, "limits": asdict(limits)}
        out, err, report = _Stream(limits.output_bytes), _Stream(limits.output_bytes), _Stream(1 << 16)
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it died: its errors tell more
                pipe.write(json.dumps(request | {"namespaces": limits.namespaces}).encode())
            with selectors.DefaultSelector() as selector:
                for source, stream in ((process.stdout.fileno(), out), (process.stderr.fileno(), err)):
                    selector.register(source, selectors.EVENT_READ, stream)
                selector.register(report_pipe, selectors.EVENT_READ, report)
                while selector.get_map():
                    remaining = start + limits.wall_s + _START_S - time.monotonic()
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
                if process.poll() is None and not report.total:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()
        if not report.total:
            reason = "the run was cancelled" if self._cancelled else err.text().strip() or "its launcher was killed"
            raise RuntimeError(f"the sandbox gave no report: {reason}")
        told = json.loads(report.kept)
        code = told.pop("exit_code")
        killed_by = "wall time" if told["timed_out"] else None
        if code is not None and code < 0:
            killed_by = "CPU time" if -code == signal.SIGXCPU else signal.Signals(-code).name
        return SandboxResult(
            stdout=out.text(),
            stderr=err.text(),
            exit_code=code,
            killed_by=killed_by,
            stdout_cut=out.cut,
            stderr_cut=err.cut,
            wall_s=time.monotonic() - start,
            **told,
        )
