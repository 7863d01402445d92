"""CPU seconds that the client takes for a request, this checkout against another one, by turns.

    git worktree add /tmp/before COMMIT
    python -m tools.bench.client --against /tmp/before [--rounds 60]

A server answers at once with a body made beforehand, so that only the client's own work is seen: the request, the
connection, the checks, the arrays. Each round sends the same requests once with each checkout, from a process of its
own that stays; the order changes from round to round. Printed are the median microseconds of a request and the median,
over the rounds, of the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tools.bench.buffer import VOCAB_SIZE

REPO = Path(__file__).parents[2]
NUM_REQUESTS = 256  # of a round
WORKER = """
import asyncio, sys, time
from fusionrl.engines.client import GenerateClient

url, (num_tokens, num_requests, vocab_size) = sys.argv[1], map(int, sys.argv[2:])

async def main():
    params = {"sampling_params": {"max_new_tokens": num_tokens}}
    async with GenerateClient(url, None, 60.0, 64, vocab_size=vocab_size) as client:
        while sys.stdin.readline():
            start = time.process_time()
            for first in range(0, num_requests, 32):
                ids = range(first, first + 32)
                await asyncio.gather(*(client.generate({"input_ids": [1, 2, 3, 4, i], **params}) for i in ids))
            print((time.process_time() - start) / num_requests, flush=True)

asyncio.run(main())
"""


def start(checkout: Path, code: list[str]) -> subprocess.Popen[str]:
    """A Python process that imports the code of `checkout`."""
    return subprocess.Popen(
        [sys.executable, *code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )


def measure(worker: subprocess.Popen[str]) -> float:
    """CPU seconds of a request."""
    assert worker.stdin and worker.stdout
    worker.stdin.write("go\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="Root of the other checkout.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 512], help="Tokens of an answer.")
    args = parser.parse_args()
    print(f"{'tokens':>6} {'this, us a request':>19} {'other, us a request':>20} {'this / other':>13}")
    for num_tokens in args.tokens:
        serve = ["-m", "tools.bench.buffer", "--serve", "--tokens", str(num_tokens)]
        server = start(REPO, serve)
        assert server.stdin and server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        worker = ["-c", WORKER, url, *map(str, (num_tokens, NUM_REQUESTS, VOCAB_SIZE))]
        workers = {"this": start(REPO, worker), "other": start(args.against, worker)}
        for one in workers.values():
            measure(one)  # imports and connections
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for number in range(args.rounds):
            for name in sorted(workers, reverse=bool(number % 2)):
                seconds[name].append(measure(workers[name]))
        ratio = statistics.median(a / b for a, b in zip(seconds["this"], seconds["other"], strict=True))
        this, other = (1e6 * statistics.median(seconds[name]) for name in ("this", "other"))
        print(f"{num_tokens:6} {this:19.0f} {other:20.0f} {ratio:13.3f}", flush=True)
        for process in (*workers.values(), server):
            assert process.stdin
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    main()
