"""A process that measures something each time it is asked, and waits between two questions."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence


class Asked:
    """It prints a line when it is ready, and one for each line that it reads."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it, and wait until it is ready.

        Raises:
            SystemExit: it ended.
        """
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._read()
        except SystemExit:
            self.close()
            raise

    def ask(self, line: str) -> str:
        """Return its answer.

        Raises:
            SystemExit: it ended.
        """
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended; reading says so
            print(line, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the process that measures beside us ended; see above")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # of what it has not read
            self._process.communicate()
