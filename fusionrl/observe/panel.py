"""The progress display as text: numbers, bars, sparklines and whole lines. Pure; `progress` draws
it.

A line is a list of pieces (text, style). A piece that does not fit into the width is left out together with
those after it, so a narrow terminal loses the least important end of a line and never shows half a number.
"""

from __future__ import annotations

import itertools
import math
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Piece = tuple[str, str]

# SGR codes of the terminal's own 16 colours, so that the user's theme decides what they look like.
PLAIN, BOLD, DIM = "", "1", "2"
GREEN, YELLOW, BLUE, MAGENTA, CYAN = "32", "33", "34", "35", "36"
PHASES = (
    ("generate", "time_generate_s", BLUE),
    ("train", "time_train_s", MAGENTA),
    ("sync", "time_sync_s", YELLOW),
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
    stack: str  # one a phase, told apart without colour
    spinner: str
    separator: str
    ellipsis: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "─", "━", "╌", "█▒░", "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "·", "…")
ASCII = Glyphs("_.:-=+*#", "-", "#", ".", "#=-", "|/-\\", "-", "~")


@dataclass(frozen=True)
class Look:
    """Form of the output to a stream: glyphs, colour, number of columns."""

    glyphs: Glyphs
    color: bool
    width: int


@dataclass
class State:
    """All that is shown. Times in seconds; `values` are the latest, `rewards` and `losses` one a step."""

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
    tick: int = 0


def glyphs_for(encoding: str | None) -> Glyphs:
    """`UNICODE` if `encoding` can write all of it, else `ASCII`."""
    text = f"{UNICODE.sparks}{UNICODE.rule}{UNICODE.bar_full}{UNICODE.bar_empty}{UNICODE.stack}{UNICODE.spinner}"
    try:
        (text + UNICODE.separator + UNICODE.ellipsis).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def color_wanted() -> bool:
    """False if NO_COLOR is set to anything (no-color.org)."""
    return not os.environ.get("NO_COLOR")


# ---- numbers -----------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """7.3 → "7.3s", 42 → "42s", 200 → "3m20s", 7500 → "2h05m", 200000 → "2d07h"."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


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


# ---- pictures ----------------------------------------------------------------------------------------------


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


# ---- text --------------------------------------------------------------------------------------------------


def cells(text: str) -> int:
    """The terminal columns of `text`: two for a wide (CJK, emoji) character, none for a combining one."""
    return sum(_cell(char) for char in text)


def _cell(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, width: int, ellipsis: str = "…") -> str:
    """`text` on one line, without control characters, cut to `width` columns with an ellipsis."""
    text = "".join(" " if unicodedata.category(char) == "Cc" else char for char in text)
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    kept, used = [], 0
    for char in text:
        if used + _cell(char) > width - 1:
            break
        kept.append(char)
        used += _cell(char)
    return "".join(kept) + ellipsis


def join(pieces: Sequence[Piece], look: Look) -> str:
    """A line of at most `look.width` columns; the first piece is cut if need be, later ones left out."""
    written: list[str] = []
    left = look.width
    for text, style in pieces:
        shown = text if written else clip(text, left, look.glyphs.ellipsis)
        if cells(shown) > left:
            shown = shown.rstrip()  # Blanks that only pad towards the next piece need no room.
            if cells(shown) > left:
                break
        left -= cells(shown)
        written.append(f"\x1b[{style}m{shown}\x1b[0m" if style and shown and look.color else shown)
    return "".join(written).rstrip()


# ---- the panel ---------------------------------------------------------------------------------------------


def panel(state: State, look: Look) -> list[str]:
    """The lines of the live display, none wider than `look.width`."""
    look = Look(look.glyphs, look.color, min(look.width, MAX_WIDTH))
    lines = [_title(state, look), _step(state, look)]
    ahead = (_ages(state), _ahead(state))
    lines += filter(None, (_headline(state, look), _accuracy(state), _speed(state), *ahead, _time(state, look)))
    lines.append(_status(state, look))
    return [join(line, look) for line in lines]


def _title(state: State, look: Look) -> list[Piece]:
    rule, dot = look.glyphs.rule, look.glyphs.separator
    name = f" fusionrl {dot} {state.mode} "
    clock = f" {duration(state.elapsed_s)} "
    space = look.width - 4 - cells(name) - cells(clock)
    if space < 4:
        return [(rule * 2, DIM), (name, BOLD)]
    return [(rule * 2, DIM), (name, BOLD), (rule * space, DIM), (clock, PLAIN), (rule * 2, DIM)]


def _label(label: str, value: str) -> list[Piece]:
    return [(f"{INDENT}{label:<{LABEL_WIDTH}}", DIM), (f"{value:<{VALUE_WIDTH}} ", BOLD)]


def _step(state: State, look: Look) -> list[Piece]:
    share = state.step / state.total_steps if state.total_steps > 0 else 0.0
    left = "" if state.left_s is None else f"{duration(state.left_s)} left"
    pieces = _label("step", f"{state.step}/{state.total_steps}")
    used = sum(cells(text) for text, _ in pieces)
    width = min(SPARK_WIDTH, look.width - used - 6)
    if width >= 6:
        full, empty = bar(share, width, look.glyphs)
        pieces += [(full, CYAN), (empty, DIM)]
    pieces.append((f" {100 * share:4.0f}%", PLAIN))
    return pieces + ([(f"   {left}", PLAIN)] if left else [])


def _headline(state: State, look: Look) -> list[Piece]:
    """The reward and its course; where there is no reward (sft), the loss and its."""
    label, history = ("reward", state.rewards) if "reward" in state.values else ("loss", state.losses)
    if label not in state.values:
        return []
    pieces = _label(label, number(state.values[label]))
    used = sum(cells(text) for text, _ in pieces)
    finite = [value for value in history if math.isfinite(value)]
    line = sparkline(finite, min(SPARK_WIDTH, look.width - used), look.glyphs)
    if len(finite) > 1:
        # The range is that of the values, not of the averaged columns; padded so that it does not wander.
        low_high = f"   {number(min(finite))} to {number(max(finite))}"
        pieces += [(line, GREEN), (" " * (SPARK_WIDTH - cells(line)) + low_high, DIM)]
    return pieces


def _accuracy(state: State) -> list[Piece]:
    values = state.values
    shown = [
        (name, percent(values[key]))
        for name, key in (("accuracy", "accuracy"), ("eval", "eval_accuracy"))
        if key in values
    ]
    if not shown:
        return []
    pieces = _label(*shown[0])
    for name, text in shown[1:]:
        pieces.append((f"{name} {text}   ", PLAIN))
    return pieces


def _speed(state: State) -> list[Piece]:
    values = state.values
    shown = [
        (name, form(values[key]))
        for name, key, form in (
            ("tokens/s", "tokens_per_s", rate),
            ("loss", "loss", number),
            ("mismatch", "mismatch", number),
        )
        if key in values and (key != "loss" or "reward" in values)
    ]
    if not shown:
        return []
    pieces = _label(*shown[0])
    for name, text in shown[1:]:
        pieces.append((f"{name} {text}   ", PLAIN))
    return pieces


def _ages(state: State) -> list[Piece]:
    """Show how old the tokens are; nothing where one rollout comes after the other."""
    values = state.values
    if "in_flight" not in values or "staleness" not in values:
        return []
    pieces = _label("staleness", number(values["staleness"]))
    return pieces + ([(f"max {values['staleness_max']:.0f}", PLAIN)] if "staleness_max" in values else [])


def _ahead(state: State) -> list[Piece]:
    """Show what runs ahead of training, and who has nothing to do."""
    values = state.values
    if "in_flight" not in values:
        return []
    pieces = _label("in flight", f"{values['in_flight']:.0f}")
    pieces += [(f"ready {values['ready']:.0f}   ", PLAIN)] if "ready" in values else []
    idle = [(name, f"{name}s_idle") for name in ("engine", "trainer")]
    return pieces + [(f"{name}s idle {percent(values[key])}   ", PLAIN) for name, key in idle if key in values]


def _time(state: State, look: Look) -> list[Piece]:
    shares = split(state.values)
    pieces = _label("time", "" if state.step_s is None else f"{duration(state.step_s)}/step")
    if shares is None:
        return pieces if state.step_s is not None else []
    percents = stacked(list(shares.values()), 100)
    # Where colour tells the phases apart the bar is solid; else each phase has its own glyph, shown in the
    # legend.
    looks = {
        name: (look.glyphs.stack[0] if look.color else glyph, style)
        for (name, _, style), glyph in zip(PHASES, look.glyphs.stack, strict=True)
    }
    legend = [
        (f"  {name} {share}%" if look.color else f"  {looks[name][0]} {name} {share}%", looks[name][1])
        for name, share in zip(shares, percents, strict=True)
    ]
    room = look.width - sum(cells(text) for text, _ in pieces + legend) - 1
    width = min(SPARK_WIDTH, max(room, 8))
    for name, count in zip(shares, stacked(list(shares.values()), width), strict=True):
        glyph, style = looks[name]
        pieces.append((glyph * count, style))
    return [*pieces, (" ", PLAIN), *legend]


def _status(state: State, look: Look) -> list[Piece]:
    if not state.status:
        return [("", PLAIN)]
    spinner = look.glyphs.spinner[state.tick % len(look.glyphs.spinner)]
    shown = clip(state.status, look.width - 12, look.glyphs.ellipsis)
    waited = f"  {duration(state.status_s)}" if state.status_s >= 1 else ""
    return [(f"{INDENT}{spinner} {shown}", CYAN), (waited, DIM)]


# ---- one line a step ---------------------------------------------------------------------------------------


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
