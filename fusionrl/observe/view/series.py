"""The metrics of a run in columns, and the steps at which one of them jumps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fusionrl.observe.metrics import METRICS_FILE, RESERVED_KEYS, nonfinite_names, read_metrics
from fusionrl.observe.view.packing import Number, short

Rows = Sequence[dict[str, Any]]  # lines of metrics.jsonl
MOST_STEPS = 20_000  # lines of a table; of a longer run every second one, every third, …
_WINDOW = 21  # steps that a value is compared with, half of them before it
_MOST_SPIKES = 8  # of one metric
_DIGITS = 6


@dataclass(frozen=True)
class Series:
    """Metrics by step.

    steps      in order
    values     name → a value for each of `steps`, None where there is none
    nonfinite  name → places in `steps` at which it was NaN or infinite
    spikes     name → places at which it jumps, the largest jump first
    num_left_out  steps of the run that are not in `steps`
    """

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[Number]] = field(default_factory=dict)
    nonfinite: dict[str, list[int]] = field(default_factory=dict)
    spikes: dict[str, list[int]] = field(default_factory=dict)
    num_left_out: int = 0


def read_rows(run: Path) -> Rows:
    """Read `metrics.jsonl` of a run's folder; nothing where there is none yet."""
    return read_metrics(run) if (run / METRICS_FILE).is_file() else []


def series_of(rows: Rows, most_steps: int = MOST_STEPS) -> Series:
    """Put lines of `metrics.jsonl` into columns, at most so many of them."""
    stride = math.ceil(len(rows) / most_steps) or 1
    thinned = rows[::-1][::stride][::-1]  # the last step is always there
    names = sorted({name for row in thinned for name in row} - RESERVED_KEYS)
    values: dict[str, list[Number]] = {}
    for name in names:
        numbers = [short(row.get(name), _DIGITS) for row in thinned]
        if any(number is not None for number in numbers) or any(name in nonfinite_names(row) for row in thinned):
            values[name] = numbers
    nonfinite = {name: [i for i, row in enumerate(thinned) if name in nonfinite_names(row)] for name in values}
    return Series(
        steps=[int(row["step"]) for row in thinned],
        values=values,
        nonfinite={name: places for name, places in nonfinite.items() if places},
        spikes={name: places for name, numbers in values.items() if (places := find_spikes(numbers))},
        num_left_out=len(rows) - len(thinned),
    )


def find_spikes(values: Sequence[Number]) -> list[int]:
    """Return the places of values that stand out from those around them, the farthest first.

    A value stands out if it is 6 robust standard deviations (1.4826 times the median deviation) from the median of its
    21 neighbours, and by a tenth of the range of all values. Too few values, or values that hardly change, have none.
    """
    places = np.array([i for i, value in enumerate(values) if value is not None], dtype=np.int64)
    if len(places) < 8:
        return []
    known = np.array([values[i] for i in places], dtype=np.float64)
    half = min(_WINDOW, len(known) - (1 - len(known) % 2)) // 2
    around = np.lib.stride_tricks.sliding_window_view(np.pad(known, half, mode="reflect"), 2 * half + 1)
    middle = np.median(around, axis=1)
    spread = 1.4826 * np.median(np.abs(around - middle[:, None]), axis=1)
    away = np.abs(known - middle)
    range_of_all = float(known.max() - known.min())
    out = (away > 6 * spread) & (away > 0.1 * range_of_all) & (range_of_all > 1e-9 * np.abs(known).max())
    spikes = np.flatnonzero(out)
    spikes = spikes[np.argsort(-away[spikes], kind="stable")][:_MOST_SPIKES]
    return [int(place) for place in places[spikes]]


def notable_steps(series: Series) -> list[int]:
    """Return the steps worth a look, the ones at which most metrics jump first, then those with a NaN."""
    counts: dict[int, int] = {}
    for group, weight in ((series.spikes, 1), (series.nonfinite, 2)):
        for places in group.values():
            for place in places:
                counts[series.steps[place]] = counts.get(series.steps[place], 0) + weight
    return sorted(counts, key=lambda step: (-counts[step], step))
