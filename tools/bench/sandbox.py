"""Seconds of a test of --rm-type code, this checkout alternating with another.

    git worktree add /tmp/before COMMIT
    python tools/bench/sandbox.py --against /tmp/before [--rounds 15] [--tests 8]

Each round grades the same programs once with each checkout, in a process of its own that stays; the order changes from
round to round. Printed are the median seconds of a test and the ratio of the sums over all rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
WORKER = """
import json, sys, time
from fusionrl.rewards.registry import grade
for line in sys.stdin:
    program, label = json.loads(line)
    start = time.perf_counter()
    share = grade("code", f"```python\\n{program}\\n```", label).reward
    print(json.dumps([time.perf_counter() - start, share]), flush=True)
"""


def kinds(number: int) -> dict[str, tuple[str, object]]:
    """(program, label of `number` tests) of each kind of test; a judged one needs two processes."""
    pairs = [(i, i + 1) for i in range(number)]
    return {
        "input": (
            "print(int(input()) + 1)",
            {"inputs": [f"{a}\n" for a, _ in pairs], "outputs": [f"{b}" for _, b in pairs]},
        ),
        "call": (
            "def f(x): return x + 1",
            {"inputs": [[a] for a, _ in pairs], "outputs": [b for _, b in pairs], "fn_name": "f"},
        ),
        "assert": ("def f(x): return x + 1", [f"assert f({a}) == {b}" for a, b in pairs]),
        "numbers": ("def f(x): return x + 1", [f"assert abs(f({a}) - {b}.0) < 1e-6" for a, b in pairs]),
        "judged": ("def f(x): return x + 1", [f"assert f({a}) in range({b}, {b + 1})" for a, b in pairs]),
        "numpy": (
            "import numpy\ndef f(x): return int(numpy.int64(x) + 1)",
            [f"assert f({a}) == {b}" for a, b in pairs],
        ),
    }


def start(checkout: Path) -> subprocess.Popen[str]:
    """A worker that grades with the code of `checkout`."""
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )


def measure(worker: subprocess.Popen[str], program: str, label: object) -> float:
    """Seconds that it took; every test must pass."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(json.dumps([program, label]) + "\n")
    worker.stdin.flush()
    seconds, share = json.loads(worker.stdout.readline())
    assert share == 1.0, (program, share)
    return float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="Root of the other checkout.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tests", type=int, default=8, help="Tests of a program.")
    args = parser.parse_args()
    workers = {"this": start(REPO), "other": start(args.against)}
    print(f"{'kind':<8} {'this, ms a test':>16} {'other, ms a test':>17} {'this / other':>13}")
    for kind, (program, label) in kinds(args.tests).items():
        for worker in workers.values():
            measure(worker, program, label)  # imports, and files that are read for the first time
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for number in range(args.rounds):
            for name in sorted(workers, reverse=bool(number % 2)):
                seconds[name].append(measure(workers[name], program, label) / args.tests)
        this, baseline = (1e3 * statistics.median(seconds[name]) for name in ("this", "other"))
        print(
            f"{kind:<8} {this:16.1f} {baseline:17.1f} {sum(seconds['this']) / sum(seconds['other']):13.3f}", flush=True
        )
    for worker in workers.values():
        assert worker.stdin
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
