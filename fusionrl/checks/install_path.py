"""Checks of where Python and fusionrl are installed: Ray starts workers by a command line and splits it at spaces."""

from __future__ import annotations

import sys
from pathlib import Path

from fusionrl.config.config import Config


def place_errors(config: Config, prefix: str = sys.prefix, package: str = str(Path(__file__).parents[1])) -> list[str]:
    """List folders with white space in their path; a run in one process has no workers of Ray."""
    if config.run.in_process:
        return []
    places = {"the Python environment": prefix, "fusionrl": package}
    return [
        f"{name} is in {path!r}: Ray starts no worker from a path with white space; move it, or use --in-process"
        for name, path in places.items()
        if any(character.isspace() for character in path)
    ]
