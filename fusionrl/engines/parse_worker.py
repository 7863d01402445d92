"""A process that parses answers for `Parsers`, one after the other.

    python -m fusionrl.engines.parse_worker DESCRIPTOR

In: a pickled `Asked`, then the body of an answer behind its length. Out: a pickled list of `Generation`s, or None where
there is something wrong with the answer. It ends when the other end of the connection is closed.
"""

from __future__ import annotations

import signal
import socket
import sys

from fusionrl.base.pipe_messages import frame, receive, receive_bytes
from fusionrl.engines.answer_checks import Asked
from fusionrl.engines.generation import Generation, parse_answer


def main(descriptor: int) -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection:
        try:
            while True:
                asked = receive(connection)
                connection.sendall(frame(_parsed(receive_bytes(connection), asked)))
        except (EOFError, ConnectionError):
            return


def _parsed(body: bytes, asked: Asked) -> list[Generation] | None:
    try:
        return parse_answer(body, asked)
    except Exception:  # the other end parses it again and raises the same, in its own process
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
