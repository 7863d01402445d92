"""The watchdog: a thread of the driver that warns when a phase takes much longer than usual.

It logs in one line what the driver waits for, since when, and how far the other processes are, and writes the stacks of
the run's processes into `logs/`, also those of stopped or blocked ones. The rules and the line are in
`observe/stalls.py`.
"""

import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self, TypeVar

from fusionrl.observe import spans
from fusionrl.observe.stalls import FLOOR_S, EndedPhase, Frame, LatePhase, Phase, StallClock, look, seconds, stall_line
from fusionrl.runtime.watchdog import ProgressProbes

T = TypeVar("T")
logger = logging.getLogger(__name__)

_WAKE_SIGNAL = signal.SIGRTMIN + 5  # to the driver's main thread; no other code sends it
_HIDDEN = ("weights/remote_calls.py", "runtime/watchdog.py", "observe/spans.py")


class Stalled(RuntimeError):
    """A phase took longer than --stall-timeout-s; the message is the watchdog's last line."""


@dataclass
class Watchdog:
    """A context manager: the thread lives within it. The main thread enters it.

    floor_s     --stall-warn-s
    timeout_s   --stall-timeout-s
    """

    logs: Path
    attempt: int
    probes: ProgressProbes
    floor_s: float = FLOOR_S
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        self.verdict: str | None = None
        """The line of the phase for which the run ends."""
        self._num_reports = 0
        self._may_end = False  # without a handler the signal would end the process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            signal.signal(_WAKE_SIGNAL, self._end_main_thread)
            self._may_end = True
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def ended_by(self, error: BaseException | None) -> Stalled | None:
        """Return the error in place of the one that has ended the run, where a stall did."""
        is_ours = isinstance(error, KeyboardInterrupt) and self.verdict is not None
        return Stalled(self.verdict) if is_ours else None

    def _end_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self.verdict is not None and not self._is_over.is_set():
            raise KeyboardInterrupt  # the one that Ray's waits let through

    def _watch(self) -> None:
        clock = StallClock(self.floor_s, self.timeout_s)
        while not self._is_over.wait(min(1.0, self.floor_s / 10)):
            phases = spans.main_phases()
            phase = _phase(phases)
            event = clock.look(time.monotonic(), phase, phases.lasted)
            if isinstance(event, EndedPhase):
                logger.warning('"%s" has ended after %s', event.phase, seconds(event.seconds))
            elif event is not None:
                self._speak(event, phase)
                if self.verdict is not None:
                    return

    def _speak(self, late: LatePhase, phase: Phase | None) -> None:
        """Say the line; end the run where it is time, and the phase has not ended while the line was made."""
        try:
            line = self.report(late)
        except Exception as error:  # the watchdog survives anything that is broken in a stalled run
            logger.debug("the watchdog's line could not be made", exc_info=True)
            line = f'"{late.phase}" has taken {seconds(late.seconds)}; the cause is unknown ({error!r})'
        if self._is_over.is_set():
            return
        logger.warning("%s", line)
        if late.is_last and self._may_end and _phase(spans.main_phases()) == phase:
            self.verdict = f"{line}; --stall-timeout-s {self.timeout_s:g}"
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, _WAKE_SIGNAL)

    def report(self, late: LatePhase) -> str:
        """Examine all processes, write the stacks, and return the line."""
        self._num_reports += 1
        waits = [item if isinstance(item, str) else self.probes.name_of(item) for item in waited_for()]
        stacks = _stacks()
        seen = [*self._probe(lambda: look(self.logs)), *self._probe(self.probes.elsewhere)]
        progress, engines = self._probe(self.probes.progress), self._probe(self.probes.engines)
        place = _place(sys._current_frames().get(threading.main_thread().ident or 0))
        path = self.logs / f"stall-{self._num_reports}.a{self.attempt}.txt"

        def line_of(file: str) -> str:
            return stall_line(
                late,
                [name for name in waits if name],
                seen,
                driver=place,
                progress=progress,
                engines=engines,
                sizes=self.probes.sizes(),
                file=file,
            )

        text = "\n".join([line_of(""), "", f"=== driver\n{stacks}", *(item.render() for item in seen)])
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:  # a full disk may be the cause: the line comes all the same
            return line_of(f"no file ({error.strerror})")
        return line_of(str(path))

    @staticmethod
    def _probe(ask: Callable[[], Sequence[T]]) -> Sequence[T]:
        try:
            return ask()
        except Exception as error:  # in a stalled run anything may be broken; ask the others
            logger.debug("the watchdog got no answer: %r", error)
            return []


def _phase(phases: spans.MainPhases) -> Phase | None:
    """The innermost phase of the driver's main thread; within one, between two others, the time since the first."""
    if phases.open is None:
        return None
    if phases.ended_ns > phases.open.start_ns:
        return Phase(f"{phases.open.name}, between its phases", phases.ended_ns / 1e9)
    return Phase(phases.open.name, phases.open.start_ns / 1e9)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(f"thread {names.get(id, id)}\n{''.join(traceback.format_stack(at))}" for id, at in frames)


def _place(innermost: FrameType | None) -> str:
    for entry in reversed(traceback.extract_stack(innermost) if innermost is not None else []):
        frame = Frame(entry.filename, entry.lineno or 0, entry.name)
        if frame.is_fusionrl and not entry.filename.endswith(_HIDDEN):
            return str(frame)
    return ""
