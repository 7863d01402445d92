"""`fusionrl flags [--template]`: the reference of all flags, or a file of them for --config."""

from collections.abc import Sequence

from fusionrl.config.reference import render_reference, render_template


def run(argv: Sequence[str]) -> int:
    """Print the page as Markdown, or with --template the commented file; returns the exit code."""
    print(render_template() if list(argv) == ["--template"] else render_reference(), end="")
    return 0
