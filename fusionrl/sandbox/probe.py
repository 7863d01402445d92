"""One run before the others: can programs start on this machine, and what is kept from them?"""

import os
from dataclasses import dataclass

from fusionrl.sandbox.limits import Limits, SandboxError
from fusionrl.sandbox.run import run_python_sync


@dataclass(frozen=True)
class Mode:
    """The kind of sandbox that this machine gives.

    name      "namespaces" or "weak"
    landlock  version of Landlock that hides files in the weak mode; 0: none
    memory    the bound on the memory of all processes of a run: "cgroup" or "watch"
    lacks     what the mode lacks of the one with namespaces and a cgroup, for people
    """

    name: str
    landlock: int
    memory: str
    lacks: tuple[str, ...]

    def __str__(self) -> str:
        hidden = f", Landlock {self.landlock}" if self.landlock else ""
        lacks = f"; lacks: {'; '.join(self.lacks)}" if self.lacks else ""
        return f"{self.name}, seccomp{hidden}, memory by {self.memory}{lacks}"


def probe(limits: Limits | None = None) -> Mode:
    """Run a small program, and return the mode that it ran in.

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
    return Mode(result.mode, result.landlock, result.memory, tuple(lacks))
