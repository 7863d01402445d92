"""`fusionrl metrics [NAME…]`: the page of all metrics as Markdown, or the entries that fit the names."""

from __future__ import annotations

from collections.abc import Sequence

from fusionrl.cli.exit_codes import refuse
from fusionrl.observe.glossary import describe, render_glossary


def run(names: Sequence[str]) -> int:
    """Print the requested table; return the exit code."""
    try:
        print("\n".join(map(describe, names)) if names else render_glossary(), end="")
    except ValueError as error:
        return refuse([str(error)])
    return 0
