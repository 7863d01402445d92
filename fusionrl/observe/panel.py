"""The progress display as text: numbers, bars, sparklines, the lines of the panel and the line of a log. Pure.

A line of the panel is a list of pieces (text, style). A piece that does not fit into the width is left out together
with those after it, so a narrow terminal loses the least important end of a line and never shows half a number.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

Piece = tuple[str, str]  # text, rich style

PHASES = (
    ("generate", "time_generate_s", "blue"),
    ("train", "time_train_s", "magenta"),
    ("sync", "time_sync_s", "yellow"),
)

INDENT, LABEL_WIDTH, VALUE_WIDTH = "  ", 10, 10
SPARK_WIDTH, MAX_WIDTH = 32, 96


@dataclass(frozen=True)
class Glyphs:
    """The characters of a display; `ASCII` where the stream's encoding has no others."""

    sparks: str
    rule: str
    bar_full: str
    bar_empty: str
    stack: str  # one per phase
    spinner: str
    separator: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "─", "━", "╌", "█▒░", "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "·")
ASCII = Glyphs("_.:-=+*#", "-", "#", ".", "#=-", "|/-\\", "-")


@dataclass
class State:
    """All that the display shows. Times in seconds; the histories have a value a step.

    values  the latest, by name: reward, accuracy, loss, tokens_per_s, mismatch, staleness, staleness_max, in_flight,
            ready, engines_idle, trainers_idle, time_generate_s, time_train_s, time_sync_s, eval_accuracy
    """

    mode: str
    total_steps: int
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    left_s: float | None = None
    step_s: float | None = None
    status: str = ""
    status_s: float = 0.0


def duration(seconds: float) -> str:
    """7.3 → "7.3s", 42 → "42s", 200 → "3m20s", 7500 → "2h05m", 200000 → "2d07h"."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    if rounded < 86400:
        return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
    return f"{rounded // 86400}d{rounded % 86400 // 3600:02d}h"


def number(value: float) -> str:
    """A value of about one, in at most 9 columns: fixed point in the usual range, else with an exponent."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def rate(value: float) -> str:
    """Tokens per second: 87.4, 1,234, 1.24M."""
    if not math.isfinite(value):
        return str(value)
    if value >= 999_950:
        return f"{value / 1e6:.2f}M"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def percent(share: float) -> str:
    """0.412 → "41.2%"."""
    return f"{100 * share:.1f}%" if math.isfinite(share) else str(share)


def split(values: Mapping[str, float]) -> dict[str, float] | None:
    """Phase → its share in the sum of the known ones (1.0 altogether); None unless two are known."""
    times = {name: max(values[key], 0.0) for name, key, _ in PHASES if key in values}
    total = sum(times.values())
    if len(times) < 2 or not math.isfinite(total) or total <= 0:
        return None
    return {name: time / total for name, time in times.items()}


def sparkline(history: Sequence[float], width: int, glyphs: Glyphs = UNICODE) -> str:
    """The whole of `history` in at most `width` columns, scaled from its smallest to its largest value.

    A longer history is averaged over equal stretches, so the line always shows the run from its start.
    """
    finite = [value for value in history if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    columns = min(width, len(finite))
    edges = [index * len(finite) // columns for index in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    top = len(glyphs.sparks) - 1
    if high - low <= 1e-12 * max(abs(high), 1e-300):
        return glyphs.sparks[top // 2] * columns
    return "".join(glyphs.sparks[round((mean - low) / (high - low) * top)] for mean in means)


def bar(share: float, width: int, glyphs: Glyphs = UNICODE) -> tuple[str, str]:
    """A bar of `width` columns as its full and its empty part; full only at 1.0."""
    share = min(max(share, 0.0), 1.0)
    full = width if share == 1.0 else min(int(share * width + 0.5), width - 1)
    return glyphs.bar_full * full, glyphs.bar_empty * (width - full)


def stacked(shares: Sequence[float], width: int) -> list[int]:
    """`width` columns dealt out by `shares` (sum 1.0), largest remainders first, so that they add up."""
    exact = [share * width for share in shares]
    columns = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: columns[index] - exact[index])
    for index in by_remainder[: width - sum(columns)]:
        columns[index] += 1
    return columns


@dataclass(frozen=True)
class _Look:
    """Form of the output: glyphs, number of columns."""

    glyphs: Glyphs
    width: int


@dataclass(frozen=True)
class Panel:
    """The live display of `state` for rich; the last line is empty, so that a killed run leaves the cursor below it."""

    state: State

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        glyphs = ASCII if options.ascii_only else UNICODE
        look = _Look(glyphs, max(min(options.max_width - 1, MAX_WIDTH), 1))
        state = self.state
        hidden = set() if "reward" in state.values else {"loss"}  # which the headline has
        hidden |= set() if "in_flight" in state.values else _AHEAD
        values = {name: value for name, value in state.values.items() if name not in hidden}
        lines = [_title(state, look), _step(state, look), _headline(state, look)]
        lines += [*(_row(values, row) for row in _ROWS), _time(state, look), _status(state, look)]
        for line in filter(None, lines):
            yield _join(line, look)
        yield Text("")


def _join(pieces: Sequence[Piece], look: _Look) -> Text:
    """Return a line of at most `look.width` columns; the first piece is cut if need be, later ones left out."""
    line = Text(no_wrap=True, overflow="crop")
    for text, style in pieces:
        # Blanks that only pad towards the next piece need no room.
        if line and cell_len(line.plain + text.rstrip()) > look.width:
            break
        line.append(text, style)
    line.truncate(look.width)
    return line


def _title(state: State, look: _Look) -> list[Piece]:
    rule, dot = look.glyphs.rule, look.glyphs.separator
    name = f" fusionrl {dot} {state.mode} "
    clock = f" {duration(state.elapsed_s)} "
    space = look.width - 4 - cell_len(name) - cell_len(clock)
    if space < 4:
        return [(rule * 2, "dim"), (name, "bold")]
    return [(rule * 2, "dim"), (name, "bold"), (rule * space, "dim"), (clock, ""), (rule * 2, "dim")]


def _label(label: str, value: str) -> list[Piece]:
    return [(f"{INDENT}{label:<{LABEL_WIDTH}}", "dim"), (f"{value:<{VALUE_WIDTH}} ", "bold")]


def _step(state: State, look: _Look) -> list[Piece]:
    share = state.step / state.total_steps if state.total_steps > 0 else 0.0
    left = "" if state.left_s is None else f"{duration(state.left_s)} left"
    pieces = _label("step", f"{state.step}/{state.total_steps}")
    used = sum(cell_len(text) for text, _ in pieces)
    width = min(SPARK_WIDTH, look.width - used - 6)
    if width >= 6:
        full, empty = bar(share, width, look.glyphs)
        pieces += [(full, "cyan"), (empty, "dim")]
    pieces.append((f" {100 * share:4.0f}%", ""))
    return pieces + ([(f"   {left}", "")] if left else [])


def _headline(state: State, look: _Look) -> list[Piece]:
    """Return the reward and its curve or, without a reward (sft), the loss and its curve."""
    label, history = ("reward", state.rewards) if "reward" in state.values else ("loss", state.losses)
    if label not in state.values:
        return []
    pieces = _label(label, number(state.values[label]))
    used = sum(cell_len(text) for text, _ in pieces)
    finite = [value for value in history if math.isfinite(value)]
    line = sparkline(finite, min(SPARK_WIDTH, look.width - used), look.glyphs)
    if len(finite) > 1:
        # The range is that of the values, not of the averaged columns; padded so that it does not wander.
        low_high = f"   {number(min(finite))} to {number(max(finite))}"
        pieces += [(line, "green"), (" " * (SPARK_WIDTH - cell_len(line)) + low_high, "dim")]
    return pieces


def _whole(value: float) -> str:
    return f"{value:.0f}"


# Rows of (name, key, format); the first known one is the label of its line.
Row = tuple[tuple[str, str, Callable[[float], str]], ...]
_ROWS: tuple[Row, ...] = (
    (("accuracy", "accuracy", percent), ("eval", "eval_accuracy", percent)),
    (("tokens/s", "tokens_per_s", rate), ("loss", "loss", number), ("mismatch", "mismatch", number)),
    (("staleness", "staleness", number), ("max", "staleness_max", _whole)),
    (
        *(("in flight", "in_flight", _whole), ("ready", "ready", _whole)),
        *(("engines idle", "engines_idle", percent), ("trainers idle", "trainers_idle", percent)),
    ),
)
# Values that tell something only where rollouts run ahead of training.
_AHEAD = {"staleness", "staleness_max", "ready", "engines_idle", "trainers_idle"}


def _row(values: Mapping[str, float], row: Row) -> list[Piece]:
    texts = [(name, form(values[key])) for name, key, form in row if key in values]
    return [*_label(*texts[0]), *((f"{name} {text}   ", "") for name, text in texts[1:])] if texts else []


def _time(state: State, look: _Look) -> list[Piece]:
    shares = split(state.values)
    pieces = _label("time", "" if state.step_s is None else f"{duration(state.step_s)}/step")
    if shares is None:
        return pieces if state.step_s is not None else []
    marks = [(glyph, *phase) for glyph, phase in zip(look.glyphs.stack, PHASES, strict=True) if phase[0] in shares]
    percents = stacked(list(shares.values()), 100)
    legend = [
        (f"  {glyph} {name} {share}%", style) for (glyph, name, _, style), share in zip(marks, percents, strict=True)
    ]
    room = look.width - sum(cell_len(text) for text, _ in pieces + legend) - 1
    columns = stacked(list(shares.values()), min(SPARK_WIDTH, max(room, 8)))
    bars = [(glyph * count, style) for (glyph, _, _, style), count in zip(marks, columns, strict=True)]
    return [*pieces, *bars, (" ", ""), *legend]


def _status(state: State, look: _Look) -> list[Piece]:
    if not state.status:
        return []
    spinner = look.glyphs.spinner[int(2 * state.elapsed_s) % len(look.glyphs.spinner)]
    status = Text(state.status)
    status.truncate(max(look.width - 12, 1), overflow="ellipsis")
    text = status.plain.replace("…", "~") if look.glyphs is ASCII else status.plain
    waited = f"  {duration(state.status_s)}" if state.status_s >= 1 else ""
    return [(f"{INDENT}{spinner} {text}", "cyan"), (waited, "dim")]


def compact(state: State, values: Mapping[str, float]) -> str:
    """One line for a log file: what this update brought, in columns of fixed width."""
    digits = len(str(state.total_steps))
    parts = [f"step {state.step:>{digits}}/{state.total_steps}"]
    columns = (
        ("reward", "reward", number, 7),
        ("acc", "accuracy", percent, 6),
        ("loss", "loss", number, 7),
        ("tok/s", "tokens_per_s", rate, 7),
        ("mismatch", "mismatch", number, 7),
        *((("stale", "staleness", number, 5),) if "in_flight" in values else ()),
    )
    parts += [f"{name} {form(values[key]):>{width}}" for name, key, form, width in columns if key in values]
    shares = split(values)
    if shares is not None:
        percents = stacked(list(shares.values()), 100)
        names = "/".join(shares).replace("generate", "gen")
        parts.append(f"{names} " + "/".join(f"{share:>2}" for share in percents) + "%")
    if values.keys() - {"eval_accuracy"}:
        if state.step_s is not None:
            parts.append(f"{duration(state.step_s):>6}/step")
        if state.left_s is not None:
            parts.append(f"{duration(state.left_s):>6} left")
    if "eval_accuracy" in values:
        parts.append(f"eval {percent(values['eval_accuracy']):>6}")
    return "  ".join(parts)
