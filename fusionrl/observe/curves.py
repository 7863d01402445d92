"""The curves of a run as one picture, drawn from its metrics; each chart appears if its keys do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionrl.base.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Metrics = Sequence[Mapping[str, Any]]
Series = tuple[list[int], list[float]]

REWARD, ACCURACY, LOSS = "rollout/raw_reward", "rollout/accuracy", "train/loss"
MISMATCH, TOKENS = "train/logprob_diff_mean", "perf/tokens_per_s"
TIMES = {  # (name, metric) → colour
    ("generate", "perf/time_generate_s"): "#5B9BC8",
    ("train", "perf/time_train_s"): "#E08A4A",
    ("sync", "perf/time_sync_s"): "#8C8C8C",
}

# Okabe and Ito's colours (distinct for colour-blind readers too), the strongest first.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, MUTED, GRID = "#222222", "#6B6B6B", "#E6E6E6"
_MOST_PLACES = 1000  # at which a curve is smoothed; a picture has fewer columns for it

_STYLE: Any = {
    **{"font.size": 10.0, "axes.edgecolor": "#B0B0B0", "axes.linewidth": 0.8, "axes.labelcolor": MUTED},
    **{"axes.titlesize": 11.0, "axes.titleweight": "bold", "axes.titlecolor": INK, "axes.titlelocation": "left"},
    **{"axes.titlepad": 10.0, "legend.frameon": False, "legend.fontsize": 9.0, "legend.labelcolor": MUTED},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8},
    **{"axes.spines.top": False, "axes.spines.right": False, "savefig.facecolor": "white"},
}
for _axis in ("xtick", "ytick"):
    _STYLE |= {f"{_axis}.color": MUTED, f"{_axis}.labelsize": 9.0, f"{_axis}.major.size": 0, f"{_axis}.minor.size": 0}

# Charts of one metric: title, unit, colour.
_CHARTS = {
    REWARD: ("Reward", "mean raw reward of a rollout", COLORS[0]),
    LOSS: ("Loss", "training loss", COLORS[0]),
    MISMATCH: ("Trainer against engine", "mean |Δ log-prob|, nats per token", COLORS[3]),
    TOKENS: ("Throughput", "tokens per second", COLORS[2]),
}


def series(metrics: Metrics, key: str) -> Series:
    """Steps and values of `key`, without the steps that lack it or hold null (no finite value)."""
    steps, values = [], []
    for line in metrics:
        value = line.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            steps.append(int(line["step"]))
            values.append(float(value))
    return steps, values


def smooth(steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """A centred Gaussian average over steps of deviation 3 % of the range, at least 1 step.

    Its weights are normalised at each step, so neither gaps nor the ends bend it.
    """
    import numpy as np

    if len(values) < 3:
        return list(values)
    at, known = np.asarray(steps, float), np.asarray(values, float)
    width = max(0.03 * (at[-1] - at[0]), 1.0)
    smoothed = []
    # Of a long run at some places, and straight lines between: at all of 100,000 steps it would take minutes.
    places = at[np.linspace(0, len(at) - 1, min(len(at), _MOST_PLACES)).astype(int)]
    for step in places:
        near = slice(*np.searchsorted(at, (step - 4 * width, step + 4 * width)))
        weights = np.exp(-0.5 * ((at[near] - step) / width) ** 2)
        smoothed.append(float(weights @ known[near] / weights.sum()))
    return [float(value) for value in np.interp(at, places, smoothed)]


def draw_curves(metrics: Metrics, out: Path, title: str) -> Path:
    """Draw what `metrics` holds of reward, accuracy, loss, mismatch, time, speed as a PNG; returns `out`.

    `metrics` is what `read_metrics` returns. Raises ValueError if no known key has a single finite value.
    """
    import matplotlib

    has_times = any(series(metrics, key)[0] for _, key in TIMES)
    charts: list[tuple[object, Callable[[Axes, Metrics], None]]] = [
        (series(metrics, REWARD)[0], partial(_draw_metric, REWARD)),
        (_accuracy_keys(metrics), _draw_accuracy),
        (series(metrics, LOSS)[0], partial(_draw_metric, LOSS)),
        (series(metrics, MISMATCH)[0], partial(_draw_metric, MISMATCH)),
        (has_times, _draw_times),
        (series(metrics, TOKENS)[0], partial(_draw_metric, TOKENS)),
    ]
    draws = [draw for has_values, draw in charts if has_values]
    if not draws:
        raise ValueError(
            f"nothing to draw for {title!r}: none of {REWARD}, eval/*/accuracy, {LOSS}, {MISMATCH}, "
            "perf/time_*_s has a value; did the run finish a step?"
        )
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(len(draws), title, _subtitle(metrics))
        for axis, draw in zip(axes, draws, strict=True):
            draw(axis, metrics)
        return _save(figure, out)


def _draw_metric(key: str, axis: Axes, metrics: Metrics) -> None:
    from matplotlib.ticker import EngFormatter

    title, unit, color = _CHARTS[key]
    steps, values = series(metrics, key)
    _line(axis, steps, values, color)
    if key == MISMATCH:
        _logarithmic(axis, values)
    elif key == TOKENS:
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    _label_axis(axis, title, unit)


def _draw_accuracy(axis: Axes, metrics: Metrics) -> None:
    from matplotlib.ticker import PercentFormatter

    steps, values = series(metrics, ACCURACY)
    if steps:
        _line(axis, steps, values, MUTED, "training rollouts")
    look: dict[str, Any] = {"linewidth": 1.8, "markersize": 5, "markeredgecolor": "white", "zorder": 3}
    for index, key in enumerate((key for key in _accuracy_keys(metrics) if key != ACCURACY), start=1):
        label = f"eval: {key.removeprefix('eval/').removesuffix('/accuracy')}"
        axis.plot(*series(metrics, key), "o-", color=COLORS[index % len(COLORS)], label=label, **look)
    top = axis.get_ylim()[1]
    axis.set_ylim(0, min(1.05 * top, 1.02) if top > 0 else 1.0)
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    axis.legend(loc="best")
    _label_axis(axis, "Accuracy", "share of correct answers")


def _draw_times(axis: Axes, metrics: Metrics) -> None:
    import numpy as np

    known = [(name, color, dict(zip(*series(metrics, key), strict=True))) for (name, key), color in TIMES.items()]
    known = [entry for entry in known if entry[2]]
    _label_axis(axis, "Time of a step", "seconds")
    steps = sorted(set().union(*(times for *_, times in known)))
    heights = np.array([[times.get(step, 0.0) for step in steps] for *_, times in known])
    total, colors = heights.sum() or 1.0, [color for _, color, _ in known]
    labels = [f"{name} ({100 * row.sum() / total:.0f}%)" for (name, *_), row in zip(known, heights, strict=True)]
    if len(steps) <= 60:
        bases = heights.cumsum(axis=0) - heights
        for row, base, color, label in zip(heights, bases, colors, labels, strict=True):
            axis.bar(steps, row, bottom=base, width=0.85, color=color, label=label, linewidth=0)
    else:
        axis.stackplot(steps, heights, colors=colors, labels=labels, linewidth=0)
    axis.set_ylim(0, 1.18 * heights.sum(axis=0).max() or 1.0)
    axis.legend(loc="upper left", ncols=len(known), handlelength=1.0, columnspacing=1.2)


def _accuracy_keys(metrics: Metrics) -> list[str]:
    names = {key for line in metrics for key in line}
    keys = [key for key in names if key == ACCURACY or (key.startswith("eval/") and key.endswith("/accuracy"))]
    return sorted(key for key in keys if series(metrics, key)[0])


def _line(axis: Axes, steps: list[int], values: list[float], color: str, label: str | None = None) -> None:
    """The values lightly, their smoothed course strongly; of a handful of values, points."""
    if len(steps) < 8:
        axis.plot(steps, values, color=color, linewidth=1.6, marker="o", markersize=4, label=label)
        return
    axis.plot(steps, values, color=color, linewidth=0.9, alpha=0.28)
    axis.plot(steps, smooth(steps, values), color=color, linewidth=2.0, label=label, solid_capstyle="round")


def _logarithmic(axis: Axes, values: list[float]) -> None:
    """A logarithmic axis that also shows zeros: trainer and engine can agree to the last bit."""
    positive = [value for value in values if value > 0]
    if not positive or min(values) < 0:
        return
    low, high = min(positive), max(positive)
    if len(positive) < len(values):
        axis.set_yscale("symlog", linthresh=low)
        axis.set_ylim(bottom=-0.1 * low)
        return
    if high / low < 10:  # less than a decade: widened, so that noise does not look like a drift
        low, high = math.sqrt(low * high) / 10, math.sqrt(low * high) * 10
        axis.set_ylim(low, high)
    axis.set_yscale("log")


def _label_axis(axis: Axes, title: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title)
    axis.set_ylabel(unit)
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    left, right = axis.get_xlim()
    if right - left < 1:  # One step only: no ticks at fractions of a step.
        axis.set_xlim(left - 1, right + 1)
    axis.grid(axis="x", visible=False)
    axis.margins(x=0.02)


def _subtitle(metrics: Metrics) -> str:
    steps = [int(line["step"]) for line in metrics]
    parts = [f"steps {min(steps)} to {max(steps)}" if len(steps) > 1 else f"step {steps[0]}"]
    attempts = {line["attempt"] for line in metrics if "attempt" in line}
    if len(attempts) > 1:
        parts.append(f"{len(attempts)} attempts")
    if nonfinite := sum(1 for line in metrics if line.get("nonfinite")):
        parts.append(f"{counted(nonfinite, 'step')} with NaN or infinite values")
    return "   ·   ".join(parts)


def _figure(count: int, title: str, subtitle: str) -> tuple[Figure, list[Axes]]:
    """A figure with `count` charts, in two columns if there are several. Needs no display, no pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = 1 if count == 1 else 2
    rows = -(-count // columns)
    head = 0.75  # inches
    height = 3.6 * rows + head
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, rect=(0, 0, 1, 1 - head / height))
    figure = Figure(figsize=(7.2 if columns == 1 else 11.5, height), dpi=130, layout=layout)
    FigureCanvasAgg(figure)
    cells = [*range(count), *[count - 1] * (columns == 2 and count % 2)]  # the last chart alone takes its row
    mosaic = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    axes = figure.subplot_mosaic(mosaic, gridspec_kw={"wspace": 0.08, "hspace": 0.1})
    left = 0.16 / figure.get_size_inches()[0]
    plain: Any = {"va": "top", "parse_math": False}  # a title is the user's text; a '$' in it starts no formula
    figure.text(left, 1 - 0.16 / height, title, fontsize=15, color=INK, weight="bold", **plain)
    figure.text(left, 1 - 0.46 / height, subtitle, fontsize=10, color=MUTED, **plain)
    return figure, [axes[chart] for chart in range(count)]


def _save(figure: Figure, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.align_ylabels()
    figure.savefig(out, format="png")
    return out
