"""Exit codes of the command, and how it reports a user's mistakes."""

import sys
from collections.abc import Iterable

from fusionrl.base.environment import hide_passwords

EXIT_USER, EXIT_FAILURE, EXIT_TERMINATED, EXIT_INTERRUPTED = 2, 1, 143, 130


def refuse(errors: Iterable[str]) -> int:
    """Print the mistakes, one line each, and return the exit code of a user's mistake."""
    for error in errors:
        print(f"error: {hide_passwords(error)}", file=sys.stderr)
    return EXIT_USER
