"""Checks that a record can be believed: its clocks agree, and its times are those that the run measured otherwise.

Of the same times there are three measurements: spans (monotonic clock, the driver's record), the times among a run's
metrics (clocks of their own, in driver and Buffer), and when each row of metrics.jsonl was written (the wall clock).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusionrl.observe.metrics import METRICS_FILE, STEP_TIME, Line
from fusionrl.observe.timeline.records import DRIVER, RunRecord, Span
from fusionrl.observe.timeline.report import OTHER, driver_shares

_CLOCK_US = 5_000
_SHARE = 0.02
_SLACK_US = 5_000  # of a step, for what lies between the two measurements
_OTHER_US = 20_000  # per step, for the driver's work between phases, which does not grow with the step
_WALL_US = 50_000  # for setting the wall clock right


@dataclass(frozen=True)
class Comparison:
    """A metric with the phases of the driver that take as long; with `is_within` they may take longer.

    fact  of a span: the step, or the version that is pushed
    """

    names: tuple[str, ...]
    fact: str
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
        yield (
            f"`{name}` of {compared.fact} {numbers} is not in the record, and {METRICS_FILE} has its {compared.metric}"
        )
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
