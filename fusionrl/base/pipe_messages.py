"""Messages between a process and a helper that it started: pickles, each behind its length."""

import pickle
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")


def frame(message: object) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message)
    return LENGTH.pack(len(data)) + data


def receive(connection: socket.socket) -> Any:
    """The next message of a blocking connection. Raises EOFError if the other end has closed it."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return pickle.loads(_read(connection, length))


def _read(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
