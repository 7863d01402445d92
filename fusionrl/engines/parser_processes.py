"""Processes that turn long answers into arrays: one interpreter parses 600 of 4,096 tokens a second, and no more.

Short answers are parsed in this process: sending them away would cost more. So are the first long ones, as starting the
processes takes as long as parsing `START_AFTER` bytes. The processes (`python -m fusionrl.engines.parser_processes`)
end with the client, or when the process that started them ends. If one dies, its answers are parsed here.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress

from fusionrl.base.environment import child_environment
from fusionrl.base.sockets import LENGTH, frame
from fusionrl.engines.answers import UNBOUNDED, AnswerBounds, AnswerError, Generation, parse_answer

MAX_PROCESSES = 4  # as many as one event loop can feed
START_AFTER = 16 << 20  # bytes of long answers: 0.2 s of a core, as two processes take to start
IN_HAND = 4  # answers that a process has at a time, so that it need not wait for the next; the rest stay here once


class ParserProcesses:
    """See the module. Belongs to one event loop; close it there."""

    def __init__(self) -> None:
        self._num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
        self._starting: asyncio.Task[list[_Parser]] | None = None
        self._num_bytes = 0  # of long answers, so far
        self._room = asyncio.Semaphore(self._num_processes * IN_HAND)

    async def parse(self, body: bytes, bounds: AnswerBounds = UNBOUNDED) -> list[Generation]:
        """As `parse_answer`, of a long answer."""
        self._num_bytes += len(body)
        if self._num_bytes > START_AFTER and (generations := await self._parse_elsewhere(body, bounds)):
            return generations
        return parse_answer(body, bounds)  # raises the error if the answer is wrong

    async def _parse_elsewhere(self, body: bytes, bounds: AnswerBounds) -> list[Generation] | None:
        async with self._room:
            if self._starting is None:
                self._starting = asyncio.create_task(_start(self._num_processes))
            parsers = await asyncio.shield(self._starting)  # a cancelled caller must not stop the others
            living = [parser for parser in parsers if parser.process.poll() is None]
            if not living:
                return None
            parser = min(living, key=lambda parser: parser.num_waiting)
            return await asyncio.shield(parser.parse(body, bounds))  # nor leave its answer for the next one

    async def close(self) -> None:
        """End the processes; who still waits for one is cancelled by its owner."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        await asyncio.wait([starting])
        if starting.cancelled() or starting.exception() is not None:  # its callers have raised its error
            return
        for parser in starting.result():
            parser.process.kill()
            parser.process.wait()
            parser.writer.close()


async def _start(count: int) -> list[_Parser]:
    parsers = []
    for _ in range(count):
        connection, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "fusionrl.engines.parser_processes"]
            env = child_environment("answer-parser")
            process = subprocess.Popen(command, stdin=theirs.fileno(), env=env)
        parsers.append(_Parser(process, *await asyncio.open_connection(sock=connection, limit=1 << 20)))
    return parsers


class _Parser:
    """One process; it answers in the order in which it is asked."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self.writer, self.num_waiting = process, writer, 0
        self._reader, self._turn = reader, asyncio.Lock()

    def parse(self, body: bytes, bounds: AnswerBounds) -> asyncio.Task[list[Generation] | None]:
        """Return the task of one answer, which gives None if the process died or the answer is wrong."""
        self.num_waiting += 1
        self.writer.write(pickle.dumps(bounds) + LENGTH.pack(len(body)))  # each write may be a call of the system
        self.writer.write(body)
        return asyncio.create_task(self._receive())

    async def _receive(self) -> list[Generation] | None:
        try:
            async with self._turn:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        finally:
            self.num_waiting -= 1


def main() -> None:
    """Parse the answers that a socket, standard input, brings; each comes after its `AnswerBounds`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends = suppress(ConnectionError, EOFError, pickle.UnpicklingError, struct.error)  # the owner was killed meanwhile
    with socket.socket(fileno=0) as connection, connection.makefile("rb") as stream, ends:
        while stream.peek(1):
            bounds = pickle.load(stream)
            body = stream.read(*LENGTH.unpack(stream.read(LENGTH.size)))
            generations: list[Generation] | None = None
            with suppress(AnswerError):  # the other end parses it again and raises the same, in its own process
                generations = parse_answer(body, bounds)
            connection.sendall(frame(generations))


if __name__ == "__main__":
    main()
