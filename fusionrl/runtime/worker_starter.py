"""Start a Ray worker as a fork of the run's nursery: `python -I -S worker_starter.py WORKER.py ARGUMENTS...`.

It replaces Ray's worker, which takes a second of a core to import Ray before its actor imports the rest. If the nursery
gives no process, this one becomes the worker. A raylet knows a worker by the pid that it sends. Standard library alone.
"""

import os
import sys

SOCKET = "worker"
"""The name of the branch's socket in the nursery's folder."""


def main(arguments: list[str]) -> None:
    """Ask for the worker, or become it."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from fusionrl.base.nursery_client import FOLDER_VARIABLE, ask

    folder, key = os.environ.get(FOLDER_VARIABLE), os.environ.get("RAY_AUTH_TOKEN", "")
    try:
        if folder:
            ask(os.path.join(folder, SOCKET), key, arguments, os.environ, (0, 1, 2))
            return
    except OSError:
        pass  # no nursery, or not with this environment
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
