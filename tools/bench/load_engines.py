"""Engines of `tools/bench/load.py`: one process that answers `/generate` as SGLang does, so many answers a second.

    python -m tools.bench.load_engines [--tokens 1000]

It prints its port, and holds every request until a line on standard input says how fast to answer: JSON with `rate`
(answers a second, the oldest request first), `version` (of the weights, in the answers that follow), or neither. It
answers each line with one of its own: requests that it holds, answers so far, CPU seconds. It ends with its input.
"""

import argparse
import asyncio
import itertools
import json
import re
import sys
import time
from collections import deque
from typing import cast

import uvloop

from fusionrl.base.process import raise_open_files
from tests.engines.long_answers import make_answer

_TICK_S = 0.002
_NUM_BODIES = 64  # that answers take in turn
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_VERSION = b'"weight_version":"1"'
_INFO = b'{"status":"ok","model_path":"paced","tokenizer_path":"paced","weight_version":"0"}'


def _response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class Pace:
    """The requests that wait for their answers, oldest first, and how fast they get them."""

    def __init__(self, num_tokens: int) -> None:
        self._bodies = [make_answer(number, num_tokens)[2] for number in range(_NUM_BODIES)]
        self.held: deque[asyncio.Transport] = deque()
        self.rate = self.num_answered = 0
        self.set_version(0)

    def set_version(self, version: int) -> None:
        stamp = b'"weight_version":"%d"' % version
        self._turns = itertools.cycle([_response(body.replace(_VERSION, stamp)) for body in self._bodies])

    async def keep(self) -> None:
        """Answer at the rate; what was due while no request was there is not made up for."""
        due, before = 0.0, time.perf_counter()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            due, before = due + (now - before) * self.rate, now
            for _ in range(min(int(due), len(self.held))):
                self.held.popleft().write(next(self._turns))
                self.num_answered += 1
                due -= 1
            due = min(due, 1.0) if not self.held else due


class Connection(asyncio.Protocol):
    """One connection of a client. It sends a request when it has the answer to the one before."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._data = pace, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or len(rest) < (int(length[1]) if length else 0):
            return
        self._data = b""
        if head.startswith(b"POST /generate "):
            self._pace.held.append(self._transport)
        else:
            self._transport.write(_response(_INFO))


async def serve(num_tokens: int) -> None:
    """Answer until standard input ends."""
    loop, pace = asyncio.get_running_loop(), Pace(num_tokens)
    server = await loop.create_server(lambda: Connection(pace), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    keeping = asyncio.create_task(pace.keep())
    while line := await asyncio.to_thread(sys.stdin.readline):
        wanted = json.loads(line)
        pace.rate = wanted.get("rate", pace.rate)
        if "version" in wanted:
            pace.set_version(wanted["version"])
        facts = {"held": len(pace.held), "answered": pace.num_answered, "cpu_s": time.process_time()}
        print(json.dumps(facts), flush=True)
    keeping.cancel()


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--tokens", type=int, default=1000, help="of an answer")
    raise_open_files()
    uvloop.run(serve(command.parse_args().tokens))
