"""Imports that several runs share: a run's nursery out of another one, which lives before the run and after it.

A nursery of `nursery_order.warm_order` has imported all that engines, Buffer and trainers on a CPU need. A command that
finds it named in its environment gets its own branches as forks of that one's, with sockets, a key and an end of their
own. It gets them only if its environment is the one of those imports, and no file of fusionrl has changed since. The
tests use it: a machine of two cores makes the imports once, and not for each of a hundred runs.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fusionrl.base.environment import child_environment
from fusionrl.base.nursery import Branch, Order
from fusionrl.base.nursery_client import ask

WARM_VARIABLE, WARM_KEY = "FUSIONRL_WARM", "FUSIONRL_WARM_KEY"
"""The folder of that nursery's sockets, and its key."""
ROOM_VARIABLE = "FUSIONRL_WARM_ROOM"
"""A long text in that nursery's environment: room for what its forks show as theirs."""
ROOT = Path(__file__).resolve().parents[2]
_SERVE = "fusionrl.base.nursery:serve_branch"
_OWN = [
    *("FUSIONRL_RUN_TOKEN", "FUSIONRL_TEST_TOKEN", "FUSIONRL_NURSERY", WARM_VARIABLE, ROOM_VARIABLE),
    *("PWD", "OLDPWD", "SHLVL", "_", "TMPDIR"),
]
"""Variables in which a run may differ, and in no others: no import keeps their values, or a fork forgets them."""


def nursery_environment() -> dict[str, str]:
    """Return the environment of a nursery that this process starts."""
    paths = [str(ROOT), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    env = child_environment("guard") | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env.setdefault("MKL_CBWR", "AUTO")  # see `Launcher`: MKL may read it before a fork is a trainer
    env["CUDA_VISIBLE_DEVICES"] = ""  # looking for a GPU before a fork breaks it in the fork
    # Libraries that start a thread a core and never change that; torch gets each fork's own number.
    return env | {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if not env.get(name)}


def warm_branch(branch: Branch, free: Sequence[str] = ()) -> Branch:
    """Return a branch whose forks are branches like `branch`. `free`: variables in which a run may differ, too."""
    return replace(branch, function=_SERVE, kept=[""], late=[], free=[*_OWN, *free])


class WarmBranches:
    """A run's branches, with the methods of `subprocess.Popen` that `EarlyStart` calls."""

    def __init__(self, order: Order, log: Path) -> None:
        """Get all of an order's branches, or none.

        Raises:
            OSError: the nursery is missing, or gives no process.
        """
        folder, key = os.environ[WARM_VARIABLE], os.environ[WARM_KEY]
        _check_owner(folder)
        _check_age(folder, order)
        env = nursery_environment()
        self._forks: list[int] = []  # descriptors of the processes: a number may be another's by then
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb", buffering=0)
        try:
            with open(log, "wb") as output:
                for branch in order.branches:
                    pid = _get(branch, order.key, env, (read, output.fileno()), (folder, key))
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


def _check_owner(folder: str) -> None:
    """Raise OSError unless the folder is private to this user: its listener gets the run's key."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{WARM_VARIABLE} {folder}: the folder is not private to this user")


def _check_age(folder: str, order: Order) -> None:
    """Raise OSError if what the nursery has imported is not what is there now."""
    began = min(os.stat(os.path.join(folder, os.path.basename(branch.path))).st_mtime for branch in order.branches)
    for path in (ROOT / "fusionrl").rglob("*.py"):
        if path.stat().st_mtime > began:
            raise OSError(f"{path} is younger than the nursery")


def _get(branch: Branch, key: str, env: Mapping[str, str], files: tuple[int, int], warm: tuple[str, str]) -> int:
    """Ask for one branch; its socket listens before its process is there."""
    environment = {**env, **branch.environment}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(branch.path)
        listener.listen(64)
        arguments = [Order(key, [], [branch]).to_line().decode(), *sorted(environment)]
        path = str(Path(warm[0], Path(branch.path).name))
        descriptors = (files[0], files[1], files[1], listener.fileno())
        return ask(path, warm[1], arguments, environment, descriptors, sys.executable)
