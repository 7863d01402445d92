"""The progress of a run on the terminal: a live panel on a TTY, one aligned line a step anywhere else.

    with Progress(total_steps=200, mode="rl") as progress:
        progress.status("starting engines")
        ...
        progress.update(1, {"reward": 0.31, "time_generate_s": 7.1, "time_train_s": 4.2})
        progress.print("a line above the panel")

rich redraws the panel in place. The cursor stays visible below it, so a killed run leaves a terminal that needs no
repair.
"""

import itertools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from fusionrl.observe.formats import visible

Piece = tuple[str, str]  # text, rich style

PHASES = (
    ("generate", "time_generate_s", "blue"),
    ("train", "time_train_s", "magenta"),
    ("sync", "time_sync_s", "yellow"),
)

INDENT, LABEL_WIDTH, VALUE_WIDTH = "  ", 10, 10
SPARK_WIDTH, MAX_WIDTH = 32, 96


class Glyphs(NamedTuple):
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


def split(values: Mapping[str, float]) -> dict[str, float]:
    """Phase → its share in the sum of the known ones (1.0 altogether); {} unless two are known."""
    times = {name: max(values[key], 0.0) for name, key, _ in PHASES if key in values}
    total = sum(times.values())
    is_known = len(times) > 1 and math.isfinite(total) and total > 0
    return {name: time / total for name, time in times.items()} if is_known else {}


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
class Panel:
    """The live display of `state` for rich; the last line is empty, so that a killed run leaves the cursor below it."""

    state: State

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        glyphs, state = ASCII if options.ascii_only else UNICODE, self.state
        width = max(min(options.max_width - 1, MAX_WIDTH), 1)
        hidden = set() if "reward" in state.values else {"loss"}  # which the headline has
        hidden |= set() if "in_flight" in state.values else _AHEAD
        values = {name: value for name, value in state.values.items() if name not in hidden}
        lines = [_title(state, glyphs, width), _step(state, glyphs, width), _headline(state, glyphs, width)]
        lines += [*(_row(values, row) for row in _ROWS), _time(state, glyphs, width), _status(state, glyphs, width)]
        for line in filter(None, lines):
            yield _join(line, width)
        yield Text("")


def _join(pieces: Sequence[Piece], width: int) -> Text:
    """Return a line of at most `width` columns; the first piece is cut if need be, later ones left out."""
    line = Text(no_wrap=True, overflow="crop")
    for text, style in pieces:
        if line and cell_len(line.plain + text.rstrip()) > width:  # blanks that only pad need no room
            break
        line.append(text, style)
    line.truncate(width)
    return line


def _title(state: State, glyphs: Glyphs, width: int) -> list[Piece]:
    name, clock = f" fusionrl {glyphs.separator} {state.mode} ", f" {duration(state.elapsed_s)} "
    edge, space = (glyphs.rule * 2, "dim"), width - 4 - cell_len(name) - cell_len(clock)
    return [edge, (name, "bold"), *([(glyphs.rule * space, "dim"), (clock, ""), edge] if space >= 4 else [])]


def _label(label: str, value: str) -> list[Piece]:
    return [(f"{INDENT}{label:<{LABEL_WIDTH}}", "dim"), (f"{value:<{VALUE_WIDTH}} ", "bold")]


def _used(pieces: Sequence[Piece]) -> int:
    return sum(cell_len(text) for text, _ in pieces)


def _step(state: State, glyphs: Glyphs, width: int) -> list[Piece]:
    share = state.step / state.total_steps if state.total_steps > 0 else 0.0
    pieces = _label("step", f"{state.step}/{state.total_steps}")
    room = min(SPARK_WIDTH, width - _used(pieces) - 6)
    if room >= 6:
        full, empty = bar(share, room, glyphs)
        pieces += [(full, "cyan"), (empty, "dim")]
    pieces.append((f" {100 * share:4.0f}%", ""))
    return pieces if state.left_s is None else [*pieces, (f"   {duration(state.left_s)} left", "")]


def _headline(state: State, glyphs: Glyphs, width: int) -> list[Piece]:
    """Return the reward and its curve or, without a reward (sft), the loss and its curve."""
    label, history = ("reward", state.rewards) if "reward" in state.values else ("loss", state.losses)
    if label not in state.values:
        return []
    pieces = _label(label, number(state.values[label]))
    finite = [value for value in history if math.isfinite(value)]
    line = sparkline(finite, min(SPARK_WIDTH, width - _used(pieces)), glyphs)
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


def _time(state: State, glyphs: Glyphs, width: int) -> list[Piece]:
    shares = split(state.values)
    pieces = _label("time", "" if state.step_s is None else f"{duration(state.step_s)}/step")
    if not shares:
        return pieces if state.step_s is not None else []
    marks = [(glyph, *phase) for glyph, phase in zip(glyphs.stack, PHASES, strict=True) if phase[0] in shares]
    percents = stacked(list(shares.values()), 100)
    legend = [
        (f"  {glyph} {name} {share}%", style) for (glyph, name, _, style), share in zip(marks, percents, strict=True)
    ]
    room = width - _used(pieces + legend) - 1
    columns = stacked(list(shares.values()), min(SPARK_WIDTH, max(room, 8)))
    bars = [(glyph * count, style) for (glyph, _, _, style), count in zip(marks, columns, strict=True)]
    return [*pieces, *bars, (" ", ""), *legend]


def _status(state: State, glyphs: Glyphs, width: int) -> list[Piece]:
    if not state.status:
        return []
    spinner = glyphs.spinner[int(2 * state.elapsed_s) % len(glyphs.spinner)]
    status = Text(state.status)
    status.truncate(max(width - 12, 1), overflow="ellipsis")
    text = status.plain.replace("…", "~") if glyphs is ASCII else status.plain
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
    if shares := split(values):
        percents = stacked(list(shares.values()), 100)
        names = "/".join(shares).replace("generate", "gen")
        parts.append(f"{names} " + "/".join(f"{share:>2}" for share in percents) + "%")
    if values.keys() - {"eval_accuracy"}:
        parts += [] if state.step_s is None else [f"{duration(state.step_s):>6}/step"]
        parts += [] if state.left_s is None else [f"{duration(state.left_s):>6} left"]
    if "eval_accuracy" in values:
        parts.append(f"eval {percent(values['eval_accuracy']):>6}")
    return "  ".join(parts)


_STEPS_AVERAGED = 10


class Progress:
    """Shows how far a run is and how it fares. Thread-safe; closing leaves the last panel standing."""

    def __init__(
        self,
        total_steps: int,
        mode: str,
        stream: TextIO | None = None,
        *,
        refresh_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        is_live: bool = True,
    ) -> None:
        """Start the clock.

        `stream` defaults to stderr. A panel is redrawn every `refresh_s` seconds, with 0 on updates only. Without
        `is_live` there are lines and no panel, also on a terminal, where a debugger may ask.
        """
        stream = sys.stderr if stream is None else stream
        self._output = _Output(stream)
        self._clock = clock
        self._started = self._last_step_at = self._status_since = clock()
        self._state = State(mode=mode, total_steps=total_steps)
        self._durations: deque[float] = deque(maxlen=_STEPS_AVERAGED)
        self._logged: set[str] = set()  # texts of `status` in a log file
        self._lock = threading.RLock()  # of the state; never held while rich, which has its own lock, draws
        self._live: Live | None = None
        output = cast(TextIO, self._output)
        console = _Console(file=output, force_terminal=True, force_interactive=True, highlight=False)
        if is_live and stream.isatty() and not console.is_dumb_terminal:
            options: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False, "vertical_overflow": "crop"}
            options |= {"auto_refresh": refresh_s > 0, "refresh_per_second": 1 / refresh_s if refresh_s > 0 else 1}
            self._live = Live(console=console, get_renderable=self._panel, **options)
            self._live.start()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Report that `step` steps (of `total_steps`) are finished, with values by the names that the panel shows.

        Shares (accuracy) are in 0..1, times in seconds. A second update of the same step, such as its evaluation, adds
        to the first.
        """
        numbers = {key: float(value) for key, value in values.items() if value is not None}
        with self._lock:
            self._measure(step, numbers)
            self._state.step = step
            self._state.values.update(numbers)
            for key, history in (("reward", self._state.rewards), ("loss", self._state.losses)):
                if key in numbers:
                    history.append(numbers[key])
            self._refresh_times()
            if self._live is None:
                self._output.write(compact(self._state, numbers) + "\n")
        if self._live is not None:
            self._live.refresh()

    def status(self, text: str, recurs: bool = False) -> None:
        """Show what the run is doing now, on a TTY with the time it has taken so far. "" clears it.

        recurs  it is a phase of every step: a log file gets it once, so that a step takes one line
        """
        text = visible(text)
        with self._lock:
            if text == self._state.status:
                return
            self._state.status, self._status_since = text, self._clock()
            if self._live is None and text and not (recurs and text in self._logged):
                self._logged.add(text)
                self._output.write(self._state.status + "\n")
        if self._live is not None:
            self._live.refresh()

    def print(self, text: str) -> None:
        """Write `text`, of one or more lines, above the panel."""
        text = text.removesuffix("\n")
        if self._live is None:
            self._output.write(text + "\n")
        else:
            self._live.console.print(Text(text), soft_wrap=True)

    @property
    def width(self) -> int:
        """Columns that a line may fill: the terminal's, or what is sane in a log file."""
        return 160 if self._live is None else max(self._live.console.width - 1, 40)

    def close(self) -> None:
        """Draw the panel a last time, without status, and leave the cursor below it; safe to call twice."""
        self._state.status = ""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _measure(self, step: int, values: Mapping[str, float]) -> None:
        """Take the duration of the steps since the last update.

        The first stretch includes the start of the engines, so there the step's own times count instead, if given.
        """
        finished = step - self._state.step
        if finished <= 0:
            return
        now = self._clock()
        phases_s = sum(values.get(key, 0.0) for key in ("time_generate_s", "time_train_s", "time_sync_s"))
        passed = (now - self._last_step_at) / finished
        self._durations.append(min(phases_s, passed) if not self._durations and phases_s > 0 else passed)
        self._last_step_at = now

    def _refresh_times(self) -> None:
        state, now = self._state, self._clock()
        state.elapsed_s = now - self._started
        state.status_s = now - self._status_since
        if self._durations:
            state.step_s = sum(self._durations) / len(self._durations)
            since = min(now - self._last_step_at, state.step_s)
            state.left_s = max((state.total_steps - state.step) * state.step_s - since, 0.0)

    def _panel(self) -> Panel:
        with self._lock:
            self._refresh_times()
            return Panel(replace(self._state, values=dict(self._state.values)))


class _Console(Console):
    """A console that never hides the cursor, since a killed run could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class _Output:
    """A stream that takes text outside its encoding and survives a reader that has left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_closed = False

    def write(self, text: str) -> int:
        """Write what the encoding can say. A closed terminal or pipe does not stop the run, only the display."""
        if not self._is_closed:
            encoding = self._stream.encoding or "utf-8"
            try:
                self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
                self._stream.flush()
            except (OSError, ValueError):
                self._is_closed = True
        return len(text)

    def flush(self) -> None: ...  # `write` has flushed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
