"""Imports that several runs share: a run's nursery out of another one, which lives before the run and after it.

    python -m tests.warm_start train FLAGS      # `fusionrl train` with processes that are forks of that one's

A nursery of `warm_order` has imported all that engines, Buffer and trainers on a CPU need. A command that finds one
named in its environment gets its own branches as forks of that one's, with sockets, a key and an end of their own. It
gets them only if its environment is the one of those imports, and no file of fusionrl has changed since. So a machine
of two cores makes the imports once, and not for each of a hundred runs.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fusionrl.base import nursery
from fusionrl.base.nursery import Branch, Order
from fusionrl.base.nursery_client import ask
from fusionrl.base.process import raise_open_files, set_title
from fusionrl.runtime import early_start
from fusionrl.runtime.early_start import EarlyStart, nursery_environment

if TYPE_CHECKING:
    from fusionrl.config.config import Config

WARM_VARIABLE = "FUSIONRL_WARM"
"""The folder of that nursery's sockets, with its key in the file `key`."""
ROOM_VARIABLE = "FUSIONRL_WARM_ROOM"
"""A long text in that nursery's environment: room for what its forks show as theirs."""
SOURCES = Path(__file__).resolve().parents[1] / "fusionrl"
_OWN = [
    *("FUSIONRL_RUN_TOKEN", "FUSIONRL_TEST_TOKEN", "FUSIONRL_NURSERY", WARM_VARIABLE, ROOM_VARIABLE),
    *("PWD", "OLDPWD", "SHLVL", "_", "TMPDIR"),
]
"""Variables in which a run may differ, and in no others: no import keeps their values, or a fork forgets them."""
_LISTENER = 3  # after standard input, output and error


def warm_order(config: Config, folder: Path, key: str, free: Sequence[str] = ()) -> Order:
    """Order a nursery of whose branches those of runs like this one are forks. `free`: see `warm_branch`."""
    from fusionrl.runtime.early_start import make_order  # with what reads a model's configuration

    order = make_order(config, folder, key)
    return replace(order, branches=[warm_branch(branch, free) for branch in order.branches])


def warm_branch(branch: Branch, free: Sequence[str] = ()) -> Branch:
    """A branch whose forks are branches like `branch`. `free`: variables in which a run may differ, too."""
    return replace(branch, function="tests.warm_start:serve_branch", kept=[""], late=[], free=[*_OWN, *free])


class WarmStart(EarlyStart):
    """The start of a run whose branches are forks, where the nursery that is there gives any."""

    def prepare(self, argv: Sequence[str]) -> None:
        """Nothing has to begin before the flags are read."""

    def _order(self, config: Config) -> None:
        assert self.folder is not None
        try:
            order = early_start.make_order(config, self.folder, early_start.CLUSTER_TOKEN)
            branches: Any = WarmBranches(order, self.folder / "nursery.log")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            early_start.logger.debug("no branch of the nursery that is there: %s", error)
            super()._order(config)
        else:
            self._nursery = branches


class WarmBranches:
    """A run's branches, with the methods of `subprocess.Popen` that `EarlyStart` calls."""

    def __init__(self, order: Order, log: Path) -> None:
        """Get all of an order's branches, or none.

        Raises:
            OSError: the nursery is missing, or gives no process.
        """
        folder = Path(os.environ[WARM_VARIABLE])
        _check_age(folder, order)
        key, env = (folder / "key").read_text(), nursery_environment()
        self._forks: list[int] = []  # descriptors of the processes: a number may be another's by then
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb", buffering=0)
        try:
            with open(log, "wb") as output:
                for branch in order.branches:
                    pid = _get(branch, order.key, env, (read, output.fileno()), folder, key)
                    self._forks.append(os.pidfd_open(pid))
        except OSError:
            self.close()
            for branch in order.branches:
                Path(branch.path).unlink(missing_ok=True)
            raise
        finally:
            os.close(read)

    def kill(self) -> None:
        """End them at once."""
        for fork in self._forks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fork, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until they have ended, after `kill`."""
        for fork in self._forks:
            end = select.poll()
            end.register(fork, select.POLLIN)
            end.poll()
            os.close(fork)
        self._forks = []

    def close(self) -> None:
        """End them, and wait for it. Idempotent."""
        self.kill()
        self.wait()
        self.stdin.close()


def _check_age(folder: Path, order: Order) -> None:
    """Raise OSError if what the nursery has imported is not what is there now."""
    began = min((folder / Path(branch.path).name).stat().st_mtime for branch in order.branches)
    for path in SOURCES.rglob("*.py"):
        if path.stat().st_mtime > began:
            raise OSError(f"{path} is younger than the nursery")


def _get(
    branch: Branch, own_key: str, env: Mapping[str, str], files: tuple[int, int], folder: Path, warm_key: str
) -> int:
    """Ask for one branch; its socket listens before its process is there."""
    environment = {**env, **branch.environment}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(branch.path)
        listener.listen(64)
        arguments = [Order(own_key, [branch]).to_line().decode(), *sorted(environment)]
        descriptors = (files[0], files[1], files[1], listener.fileno())
        return ask(str(folder / Path(branch.path).name), warm_key, arguments, environment, descriptors, sys.executable)


def serve_branch(arguments: list[str]) -> NoReturn:
    """Be the branch of an order (`Order.to_line`) that has no other, in a fork of one that has its modules, or more.

    It ends when its standard input is closed, and gets the socket that listens after its output's files. `arguments`:
    the order, and the names of the requested variables.
    """
    raise_open_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = Order.from_line(arguments[0].encode())
    (branch,) = order.branches
    set_title(f"fusionrl.base.nursery {os.path.basename(branch.path)}")
    _show_environment()
    by_imports = {name: os.environ.pop(name) for name in set(os.environ) - set(arguments[1:])}
    imported = nursery.ImportedBranch(branch)
    os.environ.update(by_imports)
    nursery.serve(imported, socket.socket(fileno=_LISTENER), order.key)


DRIVER = "driver"
"""Socket of the branch whose forks are drivers."""


def driver_branch(folder: Path, free: Sequence[str]) -> Branch:
    """A branch whose forks are `fusionrl train`: a driver's imports take a core two seconds."""
    modules = ["fusionrl.cli.resolve", "fusionrl.cli.plan", "fusionrl.runtime.run", "fusionrl.runtime.worker_imports"]
    modules += ["matplotlib.figure", "matplotlib.backends.backend_agg"]
    # Variables of devices and threads, which a nursery gets and a driver does not.
    others = ["CUDA_VISIBLE_DEVICES", "MKL_CBWR", "OPENBLAS_NUM_THREADS", "PYTHONPATH"]
    return Branch(str(folder / DRIVER), modules, "tests.warm_start:drive", kept=[""], free=[*_OWN, *others, *free])


def drive(arguments: list[str]) -> None:
    """Run a command line in a fork. `arguments`: file for the exit code, names of its variables, the command line."""
    status, names, *argv = arguments
    for name in set(os.environ) - set(names.split(",")):  # that imports have set
        del os.environ[name]
    _show_environment()
    set_title(f"tests.warm_start {' '.join(argv)}")
    end = os._exit

    def exit_with(code: int) -> NoReturn:
        Path(status).write_text(str(code))
        end(code)

    os._exit = exit_with
    sys.argv = [__file__, *argv]
    raise SystemExit(_warm_main()(argv))


def _warm_main() -> Callable[[Sequence[str]], int]:
    """The command line, whose runs begin with forks; its modules import the class by its name."""
    import fusionrl.cli.train

    fusionrl.cli.train.EarlyStart = WarmStart  # type: ignore[misc, attr-defined]
    return fusionrl.cli.main


class ForkedDriver:
    """A driver that is a fork, with what tests call of `subprocess.Popen`."""

    def __init__(self, argv: Sequence[str], output: int, environment: Mapping[str, str], status: Path) -> None:
        """Raises OSError if no nursery is there, or it must not give one. `output`: its file."""
        folder, self._status = Path(environment[WARM_VARIABLE]), status
        with open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), output, output)
            key = (folder / "key").read_text()
            self.pid = ask(str(folder / DRIVER), key, [str(status), ",".join(environment), *argv], environment, files)
        self.returncode: int | None = None
        self._process = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Exit code; None: it lives."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; that of a driver that was killed is -SIGKILL."""
        if self.returncode is None:
            end = select.poll()
            end.register(self._process, select.POLLIN)
            if not end.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("fusionrl", timeout or 0)
            os.close(self._process)
            self.returncode = int(self._status.read_text()) if self._status.exists() else -signal.SIGKILL
        return self.returncode


def _show_environment() -> None:
    """Show this process's present environment where the system shows the one that it was started with.

    What does not fit into the old one's place is left out, the longest variables first.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: fields 50 and 51, counted from 1
    left, text = end - start, bytearray()
    for name, value in sorted(os.environb.items(), key=lambda item: len(item[0]) + len(item[1])):
        variable = name + b"=" + value + b"\0"
        if len(text) + len(variable) > left:
            break
        text += variable
    ctypes.memmove(start, bytes(text.ljust(left, b"\0")), left)


if __name__ == "__main__":
    from fusionrl.cli import main

    raise SystemExit((_warm_main() if WARM_VARIABLE in os.environ else main)(sys.argv[1:]))
