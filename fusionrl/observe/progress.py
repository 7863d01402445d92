"""The progress of a run on the terminal: a live panel on a TTY, one aligned line a step anywhere else.

    with Progress(total_steps=200, mode="rl") as progress:
        progress.status("starting engines")
        ...
        progress.update(1, {"reward": 0.31, "time_generate_s": 7.1, "time_train_s": 4.2})
        progress.print("a line above the panel")

rich redraws the panel in place. The cursor stays visible below it, so a killed run leaves a terminal that needs no
repair.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fusionrl.observe.panel import Panel, State, compact
from fusionrl.observe.safe_text import visible

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
            self._live = Live(
                console=console,
                auto_refresh=refresh_s > 0,
                refresh_per_second=1 / refresh_s if refresh_s > 0 else 1,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
                get_renderable=self._panel,
            )
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
            if "reward" in numbers:
                self._state.rewards.append(numbers["reward"])
            if "loss" in numbers:
                self._state.losses.append(numbers["loss"])
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
