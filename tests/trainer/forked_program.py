"""A Python program in a fork of the ranks' forkserver, which has imported Megatron: a start saves 4 s of a core.

For programs whose imports are not what is tested.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def _become(words: Sequence[str], environment: Mapping[str, str], output: str, errors: str) -> None:
    for path, number in ((os.devnull, 0), (output, 1), (errors, 2)):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


class ForkedProgram:
    """`python WORDS…` that runs; `folder` keeps what it writes."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        number = len(list(folder.glob("output-*")))
        self._words, self._files = words, [folder / f"{name}-{number}" for name in ("output", "errors")]
        for file in self._files:
            file.touch()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_become, args=(words, dict(os.environ), *map(str, self._files)))
        self.process.start()

    def wait(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end; a program that takes longer is killed."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self._words, timeout_s)
        output, errors = (file.read_text() for file in self._files)
        return subprocess.CompletedProcess(list(self._words), self.process.exitcode, output, errors)
