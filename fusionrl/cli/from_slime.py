"""`fusionrl from-slime SCRIPT` and the shims that it makes; the wing `compat` has the code of both."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Print the command that does what a launch script for slime does; returns the exit code."""
    from fusionrl.compat.slime import command

    return command.run(argv)


def run_launch(argv: Sequence[str], program: str = "train") -> int:
    """Run `fusionrl train` with the arguments of slime's `program`.py, and its defaults; returns the exit code.

    Shims that earlier versions made import this name.
    """
    from fusionrl.compat.slime import command

    return command.run_launch(argv, program)
