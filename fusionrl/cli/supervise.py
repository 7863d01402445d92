"""`fusionrl train --supervise`: the run is a process of its own, and one that died is started again with --resume."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fusionrl.base.process import signal_name
from fusionrl.cli import EXIT_FAILURE
from fusionrl.config.parser import CommandLineError, read_args
from fusionrl.observe.run_dir import CONFIG_FILE
from fusionrl.runtime.restarts import Restarts

logger = logging.getLogger(__name__)

FLAG = "--supervise"
_COMMAND = (sys.executable, "-m", "fusionrl.cli", "train")
_PR_SET_PDEATHSIG = 1
_FOR_THE_FIRST_START = "--replay-schedule"  # a record begins with the run


def supervise(argv: Sequence[str]) -> int:
    """Run the command of `argv` without the flag, and again as often as --max-restarts allows; return its exit code.

    It is started again where it failed or was killed, at most --max-restarts times in an hour, and in a row without a
    new checkpoint; not after a user's mistake, Ctrl-C, or SIGTERM, which is passed on. Where this process is killed, it
    gets SIGTERM.
    """
    arguments = [argument for argument in argv if argument != FLAG]
    try:
        run = read_args(arguments)[0].run
    except CommandLineError:  # the run's own process says what is wrong
        return _exit_code(_Child(arguments).wait())
    path = Path(run.run_dir or f"runs/{run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if run.run_dir is None:
        arguments += ["--run-dir", str(path)]
    restarts, num_in_vain, saved = Restarts(run.max_restarts), 0, _saved(path)
    while True:
        child = _Child(arguments)
        code = child.wait()
        if child.is_stopped or (code >= 0 and code != EXIT_FAILURE):
            return _exit_code(code)
        ended = f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"
        saved, before = _saved(path), saved
        num_in_vain = num_in_vain + 1 if saved == before else 0
        if num_in_vain > run.max_restarts > 0:
            logger.error("the driver ended %d times without a new checkpoint; the last time: %s", num_in_vain, ended)
            return _exit_code(code)
        try:
            restarts.begin("driver", RuntimeError(ended))
        except RuntimeError:
            return _exit_code(code)
        if (path / CONFIG_FILE).is_file() and "--resume" not in arguments:
            arguments = [*_without(_FOR_THE_FIRST_START, arguments), "--resume"]


def _without(flag: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments without a flag that has one value."""
    values = {number + 1 for number, argument in enumerate(arguments) if argument == flag}
    kept = enumerate(arguments)
    return [text for number, text in kept if number not in values and text.partition("=")[0] != flag]


def _saved(path: Path) -> set[str]:
    folder = path / "checkpoints"
    return {entry.name for entry in folder.glob("step_*")}  # one that is being written has another name


def _exit_code(code: int) -> int:
    """Return what a shell says of a process; Python has the negative number of the signal that killed it."""
    return code if code >= 0 else 128 - code


def _is_in_foreground() -> bool:
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:  # whatever the standard input is
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal
        return False


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class _Child:
    """The run's process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.is_stopped = False
        """A signal asked it to end."""
        self._process = subprocess.Popen([*_COMMAND, *arguments], preexec_fn=_end_with_parent)

    def wait(self) -> int:
        """Return its exit code; the negative number of the signal that killed it."""
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.is_stopped = True
        if number == signal.SIGTERM or not _is_in_foreground():  # a terminal sends Ctrl-C to both
            self._process.send_signal(number)
