"""The progress of a run on the terminal: a live panel on a TTY, one aligned line a step anywhere else.

    with Progress(total_steps=200, mode="rl") as progress:
        progress.status("starting engines")
        ...
        progress.update(1, {"reward": 0.31, "time_generate_s": 7.1, "time_train_s": 4.2})
        progress.print("a line above the panel")

The panel is redrawn in place with three ANSI sequences (cursor up, carriage return, erase to the end of the
screen) and leaves the cursor visible below itself, so a run that is killed leaves a terminal that needs no
repair.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self, TextIO

from fusionrl.observe.panel import Look, State, cells, clip, color_wanted, compact, glyphs_for, panel

VALUE_KEYS = (
    "reward",
    "accuracy",
    "loss",
    "tokens_per_s",
    "mismatch",
    "staleness",
    "staleness_max",
    "in_flight",
    "ready",
    "engines_idle",
    "trainers_idle",
    "time_generate_s",
    "time_train_s",
    "time_sync_s",
    "eval_accuracy",
)

_SGR = re.compile(r"\x1b\[[0-9;]*m")
_STEPS_AVERAGED = 10


class Progress:
    """Shows how far a run is and how it fares. Thread-safe; closing leaves the last panel standing."""

    def __init__(
        self,
        total_steps: int,
        mode: str,
        stream: TextIO | None = None,
        *,
        first_step: int = 0,
        refresh_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        is_live: bool = True,
    ) -> None:
        """Start the clock.

        `stream` defaults to stderr. `first_step` is the number of steps an earlier attempt finished. A panel
        is redrawn every `refresh_s` seconds so that its clock runs during a long step; 0 draws on updates
        only. Without `is_live` there are lines, no panel, also on a terminal, where a debugger may ask.
        """
        self._stream = sys.stderr if stream is None else stream
        self._live = is_live and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._clock = clock
        self._started = self._last_step_at = self._status_since = clock()
        self._state = State(mode=mode, total_steps=total_steps, step=first_step)
        self._durations: deque[float] = deque(maxlen=_STEPS_AVERAGED)
        self._timed = False
        self._gone = False
        self._drawn: list[str] = []
        self._logged: set[str] = set()  # texts of `status` in a log file
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None
        if self._live and refresh_s > 0:
            self._ticker = threading.Thread(target=self._tick, args=(refresh_s,), name="progress", daemon=True)
            self._ticker.start()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Report that `step` steps (of `total_steps`) are finished, with any of `VALUE_KEYS` known by now.

        Shares (accuracy) are in 0..1, times in seconds. A second update of the same step, such as its
        evaluation, adds to the first. Raises ValueError for a key that the display does not know.
        """
        unknown = sorted(set(values) - set(VALUE_KEYS))
        if unknown:
            raise ValueError(f"progress values {unknown} are unknown; known are {', '.join(VALUE_KEYS)}")
        shown = {key: float(value) for key, value in values.items() if value is not None}
        with self._lock:
            self._measure(step, shown)
            self._state.step = step
            self._state.values.update(shown)
            if "reward" in shown:
                self._state.rewards.append(shown["reward"])
            if "loss" in shown:
                self._state.losses.append(shown["loss"])
            self._refresh_times()
            if self._live:
                self._draw()
            else:
                self._write_line(compact(self._state, shown))

    def status(self, text: str, recurs: bool = False) -> None:
        """Show what the run is doing now, on a TTY with the time it has taken so far. "" clears it.

        recurs  it is a phase of every step: a log file gets it once, so that a step takes one line
        """
        with self._lock:
            if text == self._state.status:
                return
            self._state.status, self._status_since = text, self._clock()
            if self._live:
                self._draw()
            elif text and not (recurs and text in self._logged):
                self._logged.add(text)
                self._write_line(clip(text, 10_000))

    def print(self, text: str) -> None:
        """Write `text`, of one or more lines, above the panel."""
        with self._lock:
            self._erase()
            self._write_line(text)
            if self._live and not self._closed.is_set():
                self._draw()

    @property
    def width(self) -> int:
        """Columns that a line may fill: the terminal's, or what is sane in a log file."""
        return max(self._size()[0] - 1, 40) if self._live else 160

    def close(self) -> None:
        """Draw the panel a last time, without status, and leave the cursor below it; safe to call twice."""
        with self._lock:
            if self._closed.is_set():
                return
            self._state.status = ""
            if self._live:
                self._draw()
            self._drawn = []
            self._closed.set()
        if self._ticker is not None:
            self._ticker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- time ----------------------------------------------------------------------------------------------

    def _measure(self, step: int, values: Mapping[str, float]) -> None:
        """Take the duration of the steps since the last update.

        The first stretch holds the start of the engines too, so there the step's own times stand for it, if
        given.
        """
        finished = step - self._state.step
        if finished <= 0:
            return
        now = self._clock()
        own = sum(values.get(key, 0.0) for key in ("time_generate_s", "time_train_s", "time_sync_s"))
        passed = (now - self._last_step_at) / finished
        self._durations.append(min(own, passed) if not self._timed and own > 0 else passed)
        self._timed = True
        self._last_step_at = now

    def _refresh_times(self) -> None:
        state, now = self._state, self._clock()
        state.elapsed_s = now - self._started
        state.status_s = now - self._status_since
        if self._durations:
            state.step_s = sum(self._durations) / len(self._durations)
            since = min(now - self._last_step_at, state.step_s)
            state.left_s = max((state.total_steps - state.step) * state.step_s - since, 0.0)

    def _tick(self, refresh_s: float) -> None:
        while not self._closed.wait(refresh_s):
            with self._lock:
                if not self._closed.is_set():
                    self._state.tick += 1
                    self._draw()

    # ---- the terminal --------------------------------------------------------------------------------------

    def _size(self) -> tuple[int, int]:
        """Columns and rows, asked anew each time since windows are resized."""
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError, AttributeError):  # A stream that only says it is a terminal.
            size = shutil.get_terminal_size()
        return size.columns or 80, size.lines or 24

    def _draw(self) -> None:
        self._refresh_times()
        columns, rows = self._size()
        look = Look(glyphs_for(self._stream.encoding), color_wanted(), max(columns - 1, 1))
        lines = panel(self._state, look)
        if self._closed.is_set() or not self._state.status:
            lines = lines[:-1]
        # A panel taller than the screen could not be reached by moving up.
        lines = lines[: max(rows - 1, 1)]
        self._write(self._erasure(columns) + "".join(f"{line}\n" for line in lines))
        self._drawn = lines

    def _erase(self) -> None:
        if self._drawn:
            self._write(self._erasure(self._size()[0]))
            self._drawn = []

    def _erasure(self, columns: int) -> str:
        """Up over the panel as it stands now: after a resize its lines may have been wrapped into several."""
        rows = sum(max(-(-cells(_SGR.sub("", line)) // columns), 1) for line in self._drawn)
        return f"\x1b[{rows}A\r\x1b[J" if rows else ""

    def _write_line(self, text: str) -> None:
        self._write(text if text.endswith("\n") else text + "\n")

    def _write(self, text: str) -> None:
        if self._gone:
            return
        # A user's text may hold what an ASCII terminal cannot show.
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, errors="replace").decode(encoding)
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal was closed, or the pipe's reader has left: the run goes on without its display.
            self._gone = True
