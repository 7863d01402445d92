"""Programs that a raylet starts in place of agents and workers: `python -I -S ray_programs.py agent|worker COMMAND...`.

agent   sleeps until the raylet ends. With the command of the runtime environment agent it listens on the agent's port,
        writes the port where the raylet looks for it, and becomes the agent on the first connection. That connection is
        lost, and the raylet tries again. It starts in 20 ms, the agent in a second.
worker  has the run's nursery fork a worker, or becomes one if the nursery gives no process. Ray's worker takes a second
        of a core to import Ray before its actor imports the rest. A raylet knows a worker by the pid that it sends.

Standard library alone.
"""

import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

_PORT, _HOST, _FOLDER, _NODE = "--runtime-env-agent-port", "--node-ip-address", "--session-dir", "--node-id"
_PR_SET_PDEATHSIG = 1
_LOOK_MS = 1000


def sleep_as_agent(name: str = "", *command: str) -> None:
    """Sleep until the raylet ends, or a client wants the agent of `command`, whose port file has the `name`."""
    import ctypes

    raylet = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sleeping = select.poll()
    if command:
        try:
            listener = _listen(name, command)
        except (LookupError, OSError):  # Ray's own agent says what is wrong
            os.execv(command[0], command)
        port = listener.getsockname()[1]
        sleeping.register(listener, select.POLLIN)
    while os.getppid() == raylet:
        if sleeping.poll(_LOOK_MS):
            same = [f"{_PORT}={port}" if word.startswith(f"{_PORT}=") else word for word in command]
            os.execv(command[0], same)  # closes the listener


def _listen(name: str, command: Sequence[str]) -> socket.socket:
    """Listen where the agent would, and write the port into its file."""
    host, port = _option(command, _HOST), int(_option(command, _PORT) or 0)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(16)
    path = os.path.join(_option(command, _FOLDER), f"{name}_{_option(command, _NODE)}")
    with open(f"{path}.tmp", "w", encoding="ascii") as file:
        file.write(str(listener.getsockname()[1]))
    os.replace(f"{path}.tmp", path)
    return listener


def _option(command: Sequence[str], name: str) -> str:
    """Return the value of an option that is given as name=value. Raises LookupError if it is not given; this version of
    Ray starts its agent otherwise."""
    values = [word.partition("=")[2] for word in command if word.partition("=")[0] == name]
    if not values:
        raise LookupError(name)
    return values[-1]


def start_worker(*command: str) -> None:
    """Ask for a worker, WORKER.py and its arguments, or become it."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from fusionrl.base.nursery_client import FOLDER_VARIABLE, WORKER_SOCKET, ask

    folder, key = os.environ.get(FOLDER_VARIABLE), os.environ.get("RAY_AUTH_TOKEN", "")
    try:
        if folder:
            ask(os.path.join(folder, WORKER_SOCKET), key, command, os.environ, (0, 1, 2))
            return
    except OSError:
        pass  # no nursery, or not with this environment
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    {"agent": sleep_as_agent, "worker": start_worker}[sys.argv[1]](*sys.argv[2:])
