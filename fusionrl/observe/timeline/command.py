"""`fusionrl timeline`: flags, the file, the report."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusionrl.observe.metrics import read_lines
from fusionrl.observe.show import find_run, parse_steps
from fusionrl.observe.timeline.check import COMPARED, record_faults
from fusionrl.observe.timeline.records import attempts, read_attempt, steps_of
from fusionrl.observe.timeline.report import report
from fusionrl.observe.timeline.trace_file import build, write

TRACE_FILE = "timeline.json"
EXIT_FAILED = 1

_HELP = """Write what every process of a run did, and when, as one file for ui.perfetto.dev or chrome://tracing, and
report where the time went. A run that is still going may be looked at."""


def main(argv: Sequence[str]) -> int:
    """`fusionrl timeline [RUN] …`; returns the exit code, 1 if --check finds a fault."""
    options = _parser().parse_args(argv)
    run = find_run(options.run)
    if options.samples < 0:
        raise ValueError(f"--samples {options.samples}: expected 0 or more")
    known = attempts(run)
    if options.attempt is not None and options.attempt not in known:
        raise ValueError(f"--attempt {options.attempt}: the run has a record of {', '.join(map(str, known))}")
    attempt = options.attempt or known[-1]
    # For a live run, before its record, which then has all of them.
    lines = [line for line in read_lines(run) if line.attempt == attempt] if options.check else []
    recorded = read_attempt(run, attempt)
    by_step = steps_of(run, recorded)
    trace = build(run, recorded, by_step, parse_steps(options.steps), options.samples)
    path = Path(options.out) if options.out else run / TRACE_FILE
    try:
        size = write(trace.events, path, recorded.wall_ns)
    except OSError as error:
        raise ValueError(f"--out {path} cannot be written ({error.strerror}); name another file") from error
    print(f"{path}: {len(trace.events):,} events, {size / 1e6:.1f} MB; open it at ui.perfetto.dev")
    for line in report(recorded, by_step):
        print(line)
    if not options.check:
        return 0
    messages = record_faults(recorded, lines)
    if not messages:
        has_times = any(compared.metric in line.values for line in lines for compared in COMPARED)
        with_metrics = "times agree with metrics.jsonl" if has_times else "metrics.jsonl has no times to compare"
        print(f"checked: measured clocks agree, {with_metrics}")
    for fault in messages:
        print(f"fault: {fault}", file=sys.stderr)
    return EXIT_FAILED if messages else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fusionrl timeline", description=_HELP)
    parser.add_argument("run", metavar="RUN", nargs="?", help="run folder; default: the newest one under runs/")
    parser.add_argument("--out", metavar="FILE", help=f"the file to write; default: {TRACE_FILE} in the run's folder")
    parser.add_argument("--attempt", type=int, metavar="N", help="of a resumed run; default: the last")
    parser.add_argument("--steps", metavar="A-B", help="these steps only, in the file; default: all")
    parser.add_argument(
        "--samples",
        type=int,
        default=64,
        metavar="N",
        help="the N longest samples of each step, and all that were aborted; default: 64",
    )
    parser.add_argument("--check", action="store_true", help="check the record: clocks, times against metrics.jsonl")
    return parser
