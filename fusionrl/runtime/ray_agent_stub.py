"""Sleep in place of a Ray agent: `python -I -S ray_agent_stub.py [PORT_NAME AGENT...]`, started by a raylet.

Without a command it sleeps until the raylet ends. With the command of the runtime environment agent it listens on the
agent's port, writes the port where the raylet looks for it, and becomes the agent on the first connection. That
connection is lost, and the raylet tries again. Standard library alone: it starts in 20 ms, the agent in a second.
"""

import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

_PORT, _HOST, _FOLDER, _NODE = "--runtime-env-agent-port", "--node-ip-address", "--session-dir", "--node-id"
_PR_SET_PDEATHSIG = 1
_LOOK_MS = 1000


def option(command: Sequence[str], name: str) -> str:
    """The value of an option that is given as name=value. Raises LookupError if it is not given; this version of Ray
    starts its agent otherwise."""
    values = [word.partition("=")[2] for word in command if word.partition("=")[0] == name]
    if not values:
        raise LookupError(name)
    return values[-1]


def listen(name: str, command: Sequence[str]) -> socket.socket:
    """Listen where the agent would, and say the port by its name."""
    host, port = option(command, _HOST), int(option(command, _PORT) or 0)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(16)
    path = os.path.join(option(command, _FOLDER), f"{name}_{option(command, _NODE)}")
    with open(f"{path}.tmp", "w", encoding="ascii") as file:
        file.write(str(listener.getsockname()[1]))
    os.replace(f"{path}.tmp", path)
    return listener


def main(name: str = "", *command: str) -> None:
    """Sleep until the raylet ends, or a client wants the agent of `command`, whose port file has the `name`."""
    raylet = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sleeping = select.poll()
    if command:
        try:
            listener = listen(name, command)
        except (LookupError, OSError):  # Ray's own agent says what is wrong
            os.execv(command[0], command)
        port = listener.getsockname()[1]
        sleeping.register(listener, select.POLLIN)
    while os.getppid() == raylet:
        if sleeping.poll(_LOOK_MS):
            same = [f"{_PORT}={port}" if word.startswith(f"{_PORT}=") else word for word in command]
            os.execv(command[0], same)  # closes the listener


if __name__ == "__main__":
    main(*sys.argv[1:])
