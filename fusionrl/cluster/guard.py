"""The last one out: a small process that ends what is left of a run when its driver has ended, however it ended.

Ray's own processes watch each other, but not all at every moment: an agent that is still starting when its raylet
is killed can live on. Every process of a run on this machine inherits a token in its environment; the guard waits
until the pipe from the driver closes, gives the others a few seconds to end by themselves, and kills the rest.
Standard library alone: it must start at once and outlive everything else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

TOKEN_VARIABLE = "FUSIONRL_RUN_TOKEN"
_GRACE_S = 4.0
_POLL_S = 0.2


class Guard:
    """Held by the driver; `close` when all has been ended, so that what is left is swept at once."""

    def __init__(self) -> None:
        """Start the guard, before any process that it is to guard: they inherit the token from this one."""
        self.token = uuid.uuid4().hex
        command = [sys.executable, str(Path(__file__).resolve()), self.token]
        # A session of its own: a Ctrl-C at the terminal must not end it. Its environment has no token yet.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[TOKEN_VARIABLE] = self.token

    def close(self) -> None:
        """Let the guard sweep, and wait for it. Idempotent."""
        os.environ.pop(TOKEN_VARIABLE, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_GRACE_S + 10.0)
        except subprocess.TimeoutExpired:
            pass  # it sweeps on by itself; an error that is on its way up must not be hidden


def carriers(token: str) -> list[int]:
    """Living processes whose environment, as they were started with it, has the token."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            is_zombie = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            if not is_zombie and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (OSError, IndexError):  # it ended while we looked, or is another user's
            continue
    return found


def sweep(token: str, grace_s: float = _GRACE_S) -> None:
    """Wait up to `grace_s` seconds for the carriers to end, then kill the rest."""
    deadline = time.monotonic() + grace_s
    while (left := carriers(token)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    while left:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(_POLL_S)
        left = carriers(token)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends when the driver closes its end, or when it is gone
    sweep(sys.argv[1])
