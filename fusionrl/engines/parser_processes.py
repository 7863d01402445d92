"""Processes that turn long answers into arrays: one interpreter parses 600 of 4,096 tokens a second, and no more.

Short ones are parsed where they are; to send them away would cost more. So are the first long ones: to start the
processes takes as long as to parse `START_AFTER` bytes. They end with the client, and at the latest when the end of the
connection is closed with the process that started them. One that dies costs time: what it had is parsed here.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections import deque

from fusionrl.base.environment import child_environment
from fusionrl.base.pipe_messages import LENGTH, frame
from fusionrl.engines.answer_checks import AnswerBounds
from fusionrl.engines.generation import Generation, parse_answer

MAX_PROCESSES = 4  # as many as one event loop can feed
LONG_BYTES = 48 * 1024  # about 1,100 tokens with log-probs
START_AFTER = 16 << 20  # bytes of long answers: 0.2 s of a core, as two processes take to start
IN_HAND = 4  # answers that a process has at a time, so that it need not wait for the next; the rest stay here once


class ParserProcesses:
    """See the module. Belongs to one event loop; close it there."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._num_processes = min(cores, MAX_PROCESSES)
        self._helpers: list[_ParserProcess] = []
        self._starting: asyncio.Task[None] | None = None
        self._num_bytes = 0  # of long answers, so far
        self._room = asyncio.Semaphore(self._num_processes * IN_HAND)

    async def parse(self, body: bytes, bounds: AnswerBounds | None = None) -> list[Generation]:
        """As `parse_answer`."""
        bounds = bounds or AnswerBounds()
        if len(body) < LONG_BYTES:
            return parse_answer(body, bounds)
        self._num_bytes += len(body)
        if self._num_bytes <= START_AFTER:
            return parse_answer(body, bounds)
        async with self._room:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start())
            await asyncio.shield(self._starting)  # a cancelled caller must not stop the others
            living = [helper for helper in self._helpers if helper.is_living]
            if living:
                helper = min(living, key=lambda helper: len(helper.waiting))
                generations = await helper.parse(body, bounds)
                if generations is not None:
                    return generations
        return parse_answer(body, bounds)  # raises the error if the answer is wrong

    async def _start(self) -> None:
        for _ in range(self._num_processes):
            helper = _ParserProcess()
            self._helpers.append(helper)
            await helper.connect()

    async def close(self) -> None:
        """End the processes; who still waits for one is cancelled by its owner."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)  # its callers have raised its error
        for helper in self._helpers:
            await helper.close()
        self._helpers = []
        self._starting = None


class _ParserProcess:
    """One process; it answers in the order in which it is asked."""

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[list[Generation] | None]] = deque()
        self.is_living = True
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fusionrl.engines.parse_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment("answer-parser"),
            )

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=1 << 20)
        self._listening = asyncio.create_task(self._listen())

    def parse(self, body: bytes, bounds: AnswerBounds) -> asyncio.Future[list[Generation] | None]:
        """None: it died, or the answer is none."""
        future: asyncio.Future[list[Generation] | None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        self._writer.write(frame(bounds) + LENGTH.pack(len(body)))  # each write may be a call of the system
        self._writer.write(body)
        return future

    async def _listen(self) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                answer = pickle.loads(await self._reader.readexactly(length))
                future = self.waiting.popleft()
                if not future.done():  # the caller may have given up
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_living = False
            for future in self.waiting:
                if not future.done():
                    future.set_result(None)

    async def close(self) -> None:
        self._process.kill()
        self._process.wait()
        await self._listening
        self._writer.close()
