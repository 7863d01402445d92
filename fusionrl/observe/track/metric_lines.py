"""The lines of metrics.jsonl as a tracker gets them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from fusionrl.observe.metrics import METRICS_FILE, RESERVED_KEYS, made_by


@dataclass(frozen=True)
class Line:
    """One line.

    step     of the run
    time_s   since 1970
    values   its finite numbers, by name
    attempt  of the run that wrote it
    end      where the next line begins in the file, in bytes
    """

    step: int
    time_s: float
    values: dict[str, float]
    attempt: int
    end: int


def read_lines(run: Path, start: int = 0) -> Iterator[Line]:
    """The lines from byte `start` on. A line that is not whole (yet), or that a kill tore, is passed over.

    Lines of a step that a later attempt did again do not count, as far as the lines are there by now. So a step that
    was done again after a resume comes once, unless it was sent before the resume.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        return
    parsed = list(_parsed(path, start))
    makers = made_by((line.step, line.attempt, line.values) for line in parsed)
    yield from (line for line in parsed if line.attempt >= makers.get(line.step, 0))


def _parsed(path: Path, start: int) -> Iterator[Line]:
    with path.open("rb") as file:
        file.seek(start)
        end = start
        for text in file:
            end += len(text)
            if not text.endswith(b"\n"):
                return  # it is being written; the next look finds it whole
            try:
                row = orjson.loads(text)
                step, attempt, time_s = int(row["step"]), int(row["attempt"]), float(row["time"])
            except (ValueError, LookupError, TypeError):
                continue
            numbers = {n: v for n, v in row.items() if n not in RESERVED_KEYS and isinstance(v, bool | int | float)}
            values = {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
            yield Line(step, time_s, values, attempt, end)
