"""A process that parses answers for `ParserProcesses`, one after the other.

    python -m fusionrl.engines.parse_worker DESCRIPTOR

In: a pickled `AnswerBounds`, then the length and the body of an answer. Out: a pickled list of `Generation`s, or None
where the answer is wrong. It ends when the other end of the connection closes.
"""

from __future__ import annotations

import signal
import socket
import sys

from fusionrl.base.pipe_messages import frame, receive, receive_bytes
from fusionrl.engines.answer_checks import AnswerBounds
from fusionrl.engines.generation import Generation, parse_answer


def main(descriptor: int) -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection:
        try:
            while True:
                bounds = receive(connection)
                connection.sendall(frame(_parsed(receive_bytes(connection), bounds)))
        except (EOFError, ConnectionError):
            return


def _parsed(body: bytes, bounds: AnswerBounds) -> list[Generation] | None:
    try:
        return parse_answer(body, bounds)
    except Exception:  # the other end parses it again and raises the same, in its own process
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
