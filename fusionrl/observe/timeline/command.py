"""`fusionrl timeline`: flags, the file, the report, and --check.

The check compares three measurements of the same times: spans (monotonic clock, the driver's record), the times among a
run's metrics (clocks of their own, in driver and Buffer), and when each row of metrics.jsonl was written (wall clock).
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fusionrl.observe.metrics import METRICS_FILE, STEP_TIME, Line, read_lines
from fusionrl.observe.show import find_run, parse_steps
from fusionrl.observe.timeline.records import DRIVER, RunRecord, Span, attempts, read_attempt, steps_of
from fusionrl.observe.timeline.report import OTHER, driver_shares, report
from fusionrl.observe.timeline.trace_file import build, write

_CLOCK_US = 5_000
_SHARE = 0.02
_SLACK_US = 5_000  # of a step, for what lies between the two measurements
_OTHER_US = 20_000  # per step, for the driver's work between phases, which does not grow with the step
_WALL_US = 50_000  # for setting the wall clock right


class Comparison(NamedTuple):
    """A metric with the phases of the driver that take as long; with `is_within` they may take longer."""

    names: tuple[str, ...]
    fact: str  # of a span: the step, or the version that is pushed
    metric: str
    is_within: bool = True


COMPARED = (
    Comparison(("train",), "step", "perf/time_train_s", is_within=False),
    Comparison(("generate", "fetch"), "step", "perf/time_generate_s"),
    Comparison(("push",), "version", "perf/time_sync_s"),
    Comparison(("step",), "step", STEP_TIME),
)


def record_faults(recorded: RunRecord, lines: Sequence[Line]) -> list[str]:
    """Return what cannot be believed, one line each. `lines`: of metrics.jsonl, of the attempt."""
    messages = [  # the report names clocks that were never measured
        f"the clock of {name} on {machine.host} is known within {machine.error_us / 1e3:.1f} ms,"
        f" and not within {_CLOCK_US / 1e3:.0f}"
        for name, machine in recorded.machines.items()
        if machine.error_us is not None and machine.error_us > _CLOCK_US
    ]
    messages += _of_rows(recorded, {line.step: line.time_s for line in lines if STEP_TIME in line.values})
    for compared in COMPARED:
        key = "sync/version" if compared.fact == "version" else ""
        values = [(line.step, line.values) for line in lines if compared.metric in line.values]
        seconds = {int(numbers.get(key, step)): numbers[compared.metric] for step, numbers in values}
        messages += _of_phases(recorded, compared, seconds)
    return messages


def _of_rows(recorded: RunRecord, written: Mapping[int, float]) -> Iterator[str]:
    """Each row is written within its step; the driver's phases add up to the time between the first and the last."""
    spans = _by_fact(recorded, ("step",), "step")
    rows = {step: round(time * 1e6 - recorded.wall_ns / 1e3) for step, time in written.items()}
    for step, at in rows.items():
        slack = _WALL_US + _SHARE * at
        if step in spans and not any(span.start - slack <= at <= span.end + slack for span in spans[step]):
            yield (
                f"the row of step {step} was written {at / 1e6:.2f} s after the run began, and the record has that step"
                f" from {spans[step][0].start / 1e6:.2f} s to {spans[step][-1].end / 1e6:.2f} s"
            )
    if len(rows) < 2:
        return
    first, last = min(rows.values()), max(rows.values())
    shares = driver_shares(recorded, first, last)
    named = sum(micros for name, micros in shares.items() if name != OTHER)
    if last - first - named > _SHARE * (last - first) + _OTHER_US * (len(rows) - 1):
        yield (
            f"the driver's phases add up to {named / 1e6:.2f} s of the {(last - first) / 1e6:.2f} s between the first"
            f" step's row in {METRICS_FILE} and the last one's"
        )


def _of_phases(recorded: RunRecord, compared: Comparison, seconds: Mapping[int, float]) -> Iterator[str]:
    """Compare phases of the driver with a metric, which a clock of its own measures."""
    spans, name = _by_fact(recorded, compared.names, compared.fact), compared.names[0]
    if missing := [number for number in seconds if number not in spans]:
        numbers = ", ".join(map(str, missing[:5])) + ", …" * (len(missing) > 5)
        absent = f"`{name}` of {compared.fact} {numbers} is not in the record"
        yield f"{absent}, and {METRICS_FILE} has its {compared.metric}"
    ended = [number for number in seconds if number in spans and not any(span.is_open for span in spans[number])]
    here = sum(span.duration for number in ended for span in spans[number])
    there = 1e6 * sum(seconds[number] for number in ended)
    slack = _SHARE * there + _SLACK_US * len(ended)
    if here < there - slack or (here > there + slack and not compared.is_within):
        yield f"`{name}` takes {here / 1e6:.2f} s in the record and {there / 1e6:.2f} s in {METRICS_FILE}"


def _by_fact(recorded: RunRecord, names: tuple[str, ...], fact: str) -> dict[int, list[Span]]:
    spans = defaultdict[int, list[Span]](list)
    for span in recorded.of(DRIVER, *names):
        number = span.facts.get(fact)
        if isinstance(number, int):
            spans[number].append(span)
    return dict(spans)


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
    samples = "the N longest samples of each step, and all that were aborted; default: 64"
    parser.add_argument("--samples", type=int, default=64, metavar="N", help=samples)
    parser.add_argument("--check", action="store_true", help="check the record: clocks, times against metrics.jsonl")
    return parser
