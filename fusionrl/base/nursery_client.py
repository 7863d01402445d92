"""Ask a nursery (`fusionrl.base.nursery`) for a process.

Standard library alone: a program that runs for 30 ms uses it.
"""

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence

LENGTH = struct.Struct("!I")
MAX_DESCRIPTORS = 8
TAKEN = b"+"
_TIMEOUT_S = 120.0  # imports of a busy machine
_LOOK_S = 0.02
PID_FILE = "nursery.pid"
"""In the folder of the sockets, until they are there: the process that makes them."""
FOLDER_VARIABLE = "FUSIONRL_NURSERY"
"""The folder with the sockets of the run's nursery."""
WORKER_SOCKET = "worker"
"""The socket in that folder where a worker for Ray is requested."""


def ask(
    path: str,
    key: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    program: str = sys.executable,
) -> int:
    """Have a process forked, with these arguments of its function, environment and open files. Returns its pid.

    Its files 0, 1, 2, … are those of `descriptors`; it has this process's folder, umask and place in the order in which
    the kernel ends processes for their memory. Waits until the nursery has imported everything. Raises OSError if no
    nursery answers, or it refuses such a process for good: start it in the usual way.
    """
    request = {
        "key": key,
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": os.getcwd(),
        "umask": _umask(),
        "program": program,
        "oom_score_adj": _oom_score_adj(),
    }
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        _connect(connection, path)
        socket.send_fds(connection, [LENGTH.pack(len(data))], list(descriptors))
        connection.sendall(data)
        answer = connection.recv(LENGTH.size)
        pid = int(LENGTH.unpack(answer)[0]) if len(answer) == LENGTH.size else 0
        if pid == 0:
            reason = connection.recv(1000).decode(errors="replace") if answer else "it has ended"
            raise ConnectionRefusedError(f"the nursery at {path} gives no such process: {reason}")
        connection.sendall(TAKEN)  # a fork lives only once its asker knows of it
    return pid


def _connect(connection: socket.socket, path: str) -> None:
    """Connect, once the nursery listens: it may be at the imports that it begins with, before it knows its sockets."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        is_importing = _is_importing(os.path.dirname(path))  # looked at first: it may listen a moment later
        try:
            connection.connect(path)
            return
        except (FileNotFoundError, ConnectionRefusedError):  # the second: between a socket's path and its listening
            if not is_importing or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def _is_importing(folder: str) -> bool:
    """Return whether a nursery lives that has not yet made its sockets in this folder."""
    try:
        with open(os.path.join(folder, PID_FILE), encoding="ascii") as file:
            number = int(file.read())
        with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, ValueError):
        return False


def _oom_score_adj() -> int:
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        return int(file.read())


def _umask() -> int:
    """Read it where the system tells it: setting it, to read it, would change it for the other threads."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
