"""The function that shims of `fusionrl from-slime --shim` import; the wing `compat` has it."""

from collections.abc import Sequence


def run_launch(argv: Sequence[str], program: str = "train") -> int:
    """Run `fusionrl train` with arguments and defaults as `program`.py of slime has; returns the exit code."""
    from fusionrl.compat.slime import command

    return command.run_launch(argv, program)
