"""The sending of lines to an open tracker, and the memory of those that have arrived."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fusionrl.observe.run_dir import LOCK_FILE, is_running, other_host
from fusionrl.observe.track.adapters import Tracker
from fusionrl.observe.track.metric_lines import read_lines
from fusionrl.observe.track.sent_state import Memory, Sent

_POLL_S = 2.0


class TrackerError(Exception):
    """A tracker failed; what has arrived is remembered."""


class Sending:
    """Sends lines, and remembers a line when the tracker says that it has arrived: at a flush, or at its close.

    So a line may come twice after a crash, and none is lost. Without a `memory` nothing is remembered.
    """

    def __init__(self, run: Path, kind: str, tracker: Tracker, sent: Sent, memory: Memory | None) -> None:
        self._run, self._kind, self._tracker, self._sent, self._memory = run, kind, tracker, sent, memory
        self._end = sent.bytes  # of the lines that the tracker was given
        self._count = 0
        sent.run_id = tracker.run_id
        self._remember(sent.bytes)  # the run there, which a second command continues

    def send(self, follow: bool) -> int:
        """Send what is new, with `follow` until the run ends or Ctrl-C; return the number of lines.

        Raises:
            TrackerError: the tracker failed.
        """
        failure: Exception | None = None
        try:
            self._send_lines(follow)
        except KeyboardInterrupt:
            pass  # what was sent so far shall arrive
        except Exception as error:  # each tracker has errors of its own
            failure = error
        try:
            if self._tracker.flush():
                self._remember(self._end)
            self._tracker.close()
        except Exception as error:  # as above
            failure = failure or error
        else:
            self._remember(self._end)
        if failure is not None:
            raise TrackerError(
                f"--to {self._kind} failed after {self._count:,} lines: {type(failure).__name__}: {failure};"
                " the same command sends the rest (without --again)"
            ) from failure
        return self._count

    def _send_lines(self, follow: bool) -> None:
        while True:
            has_ended = not (follow and is_running(self._run))  # asked first: what it wrote last is read below
            start = self._end
            for line in read_lines(self._run, start):
                self._tracker.log(line)
                self._count, self._end = self._count + 1, line.end
            if self._end > start and self._tracker.flush():
                self._remember(self._end)
            if has_ended:
                return
            time.sleep(_POLL_S)

    def _remember(self, end: int) -> None:
        self._sent.bytes = end
        if self._memory is not None:
            self._memory.write(self._sent)


@contextmanager
def until_stopped() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: what was sent arrives and is remembered."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only that one may set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say_who_holds(run: Path) -> None:
    """Print a warning where the run's end cannot be seen from this machine."""
    host = other_host(run)
    if host is not None:
        print(
            f"{run} is held by host {host}, whose processes cannot be asked: if that run is dead, this continues until"
            f" {run / LOCK_FILE} is deleted, or until Ctrl-C",
            file=sys.stderr,
            flush=True,
        )
