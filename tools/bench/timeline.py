"""What does the record of the timeline cost?

    python tools/bench/timeline.py RUN                 # of a run that was made: records × the price of one
    python tools/bench/timeline.py --turns 5 -- FLAGS  # whole runs of `fusionrl train FLAGS`, by turns with and without

The first counts the records of each process of RUN, measures here what a record of each kind costs (CPU time of this
process; writing included), and gives the product as a share of the time of the run's steps. The second runs the command
line with and without the record in turns, and compares the medians of perf/step_time_s, without the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

from fusionrl.observe import spans
from fusionrl.observe.metrics import METRICS_FILE
from fusionrl.observe.sample_timeline import course, part
from fusionrl.observe.timeline.records import DRIVER, attempts, read_attempt

_NUMBER = 20_000


def price_of_records() -> dict[str, float]:
    """Kind of record → seconds of CPU time."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        spans.record_to(folder, "bench", 1)
        for kind, make in (("B", _phase), ("X", _span), ("S", _sample), ("C", _count)):
            number = _NUMBER // 10 if kind == "B" else _NUMBER
            start = time.process_time()
            for index in range(number):
                make(index)
            found[kind] = (time.process_time() - start) / number
        spans.stop_recording()
    return found | {"K": found["B"]}


def _phase(index: int) -> None:
    with spans.phase("train", step=index):
        pass


def _span(index: int) -> None:
    with spans.span("forward", micro_batch=index):
        pass


def _sample(index: int) -> None:
    with course(index=index, group=index // 8, evaluation=0) as facts:
        now = time.monotonic_ns()
        part("wait", now)
        part("turn", now, tokens=5, version=3, engine_s=0.25)
        part("reward", now, index=index)
        facts |= {"status": "completed", "tokens": 5}


def _count(index: int) -> None:
    spans.count("memory", gb=index)


def price_of_run(run: Path) -> float:
    """Print the price of each process of a run; returns the largest share of the steps' time."""
    recorded = read_attempt(run, attempts(run)[-1])
    steps = recorded.of(DRIVER, "step")
    start, end = steps[0].start, steps[-1].end
    prices, worst = price_of_records(), 0.0
    print("µs a record: " + ", ".join(f"{kind} {1e6 * price:.1f}" for kind, price in prices.items()))
    print(f"{len(steps)} steps, {(end - start) / 1e6:.2f} s")
    for process in recorded.processes():
        path = run / spans.FOLDER / f"{process}.a{recorded.attempt}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = Counter(line[0] for line in lines if isinstance(line, list))
        kinds["X"] -= kinds["B"]  # a phase has two records, and its price is of both
        seconds = sum(prices[kind] * number for kind, number in kinds.items())
        share = seconds / ((end - start) / 1e6)
        worst = max(worst, share)
        numbers = f"{sum(kinds.values()) + kinds['B']:>7} records {path.stat().st_size:>9,} bytes"
        print(f"  {process:<18}{numbers}  {1e3 * seconds:>8.1f} ms  {100 * share:.3f} % of the steps' time")
    return worst


def by_turns(flags: list[str], turns: int) -> None:
    """Run the command with and without the record, and print both medians."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(turns):
        for kind in ("with", "without") if turn % 2 else ("without", "with"):
            folder = Path(tempfile.mkdtemp(prefix="timeline-bench-"))
            environment = os.environ | ({spans.OFF_VARIABLE: "0"} if kind == "without" else {})
            command = [sys.executable, "-m", "fusionrl.cli", "train", *flags, "--run-dir", str(folder / "run")]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            rows = [json.loads(line) for line in (folder / "run" / METRICS_FILE).read_text().splitlines()]
            times = [row["perf/step_time_s"] for row in rows if row["step"] > 1 and "perf/step_time_s" in row]
            found[kind].append(median(times))
            print(f"turn {turn + 1}, {kind} the record: {found[kind][-1]:.4f} s a step", flush=True)
            shutil.rmtree(folder)
    on, off = median(found["with"]), median(found["without"])
    print(f"median of {turns} turns: {on:.4f} s with, {off:.4f} s without: {100 * (on / off - 1):+.2f} %")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--turns", type=int, default=0)
    argv = sys.argv[1:]
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = parser.parse_args(own)
    if options.turns:
        by_turns(flags, options.turns)
    elif options.run is not None:
        price_of_run(options.run)
    else:
        parser.error("name a run, or --turns N -- FLAGS")


if __name__ == "__main__":
    main()
