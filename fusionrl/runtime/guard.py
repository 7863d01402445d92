"""The last one out: a small process that ends what is left of a run when its driver has ended, however it ended.

Every process of a run on this machine inherits a token in its environment; the guard notes who has it until the pipe
from the driver closes, gives them a few seconds to end by themselves, and kills the rest. Then it removes the run's
private folder. Standard library alone: it must start at once and outlive everything else.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

TOKEN_VARIABLE = "FUSIONRL_RUN_TOKEN"
_GRACE_S = 4.0
_POLL_S = 0.2
_WATCH_S = 0.5
_LOOKS = 20  # ten seconds
_AS_USUAL = b"."  # the driver's last word


class Guard:
    """Held by the driver; `close` when all has been ended, so that what is left is swept at once."""

    def __init__(self, folder: Path | None = None, env: dict[str, str] | None = None) -> None:
        """Start the guard, before any process that it is to guard: they inherit the token from this one.

        `folder` is removed at the end; `env` is the guard's environment.
        """
        self.token = uuid.uuid4().hex
        command = [sys.executable, str(Path(__file__).resolve()), self.token, *([str(folder)] if folder else [])]
        # A session of its own: a Ctrl-C at the terminal must not end it. Its environment has no token yet.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=env)
        os.environ[TOKEN_VARIABLE] = self.token

    def close(self) -> None:
        """Let the guard sweep, and wait for it. Idempotent."""
        os.environ.pop(TOKEN_VARIABLE, None)
        assert self._process.stdin is not None
        with suppress(OSError):  # of a guard that was killed
            self._process.stdin.write(_AS_USUAL)
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_GRACE_S + 10.0)
        except subprocess.TimeoutExpired:
            pass  # it sweeps on by itself; an error that is on its way up must not be hidden


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _carries(pid: int, token: str) -> bool:
    try:
        return f"{TOKEN_VARIABLE}={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended while we looked, or is another user's
        return False


def _stat(pid: int) -> list[str] | None:
    """The system's facts about a process, from its state on; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] == "Z" else fields


def _start_time(pid: int) -> str | None:
    """Return the start of the process in ticks; None if it has ended. With its number it names one process for ever."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


class ProcessWatch:
    """The processes of a run, as they are found while it lives.

    A look at the end is not enough: a process that gives itself a title (Ray's do) writes it over its environment,
    token and all. A fork of the run's nursery does so at once; it is known by its parent.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self._looks: dict[int, int] = {}  # how often each process was looked at
        self._found: dict[int, str] = {}  # process → start time

    def look(self) -> None:
        """Look at what is new. Several times: between fork and exec a process has another environment."""
        pids = _pids()
        for pid in pids:
            looks = self._looks.get(pid, 0)
            if looks < _LOOKS and pid not in self._found:
                facts = _stat(pid)
                if facts is not None and (_carries(pid, self.token) or self._is_found(int(facts[1]))):
                    self._found[pid] = facts[19]
            self._looks[pid] = looks + 1
        for gone in set(self._looks) - set(pids):
            self._looks.pop(gone)
            self._found.pop(gone, None)

    def _is_found(self, pid: int) -> bool:
        return pid in self._found and _start_time(pid) == self._found[pid]

    def living(self) -> list[int]:
        return [pid for pid, start in self._found.items() if _start_time(pid) == start]


def sweep(watch: ProcessWatch, grace_s: float = _GRACE_S) -> None:
    """Wait up to `grace_s` seconds for the run's processes to end, then kill the rest."""
    deadline = time.monotonic() + grace_s
    while True:
        watch.look()
        left = watch.living()
        if not left:
            return
        if time.monotonic() >= deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(_POLL_S)


def _obituary() -> str:
    text = "the driver ended without a message of its own: it was killed, or has crashed"
    with suppress(OSError):
        stats = os.statvfs("/dev/shm")
        if 16 * stats.f_bavail < stats.f_blocks:
            text += "; /dev/shm, in which Ray keeps objects, is nearly full (`ls -l /dev/shm`)"
    return f"failed: {text}; --resume continues from the last checkpoint"


def main(token: str, folder: str | None = None) -> None:
    """Watch until the driver closes its end of the pipe, or is gone; then sweep, and remove the folder."""
    watch = ProcessWatch(token)
    while not select.select([sys.stdin], [], [], _WATCH_S)[0]:
        watch.look()
    if sys.stdin.buffer.read(1) != _AS_USUAL:
        with suppress(OSError):
            print(_obituary(), file=sys.stderr, flush=True)
    sweep(watch)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
