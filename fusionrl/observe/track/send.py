"""The sending of lines to an open tracker, and the memory of those that have arrived: `trackers.json` of a run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fusionrl.base.environment import hide_passwords
from fusionrl.observe.json_values import write_atomically
from fusionrl.observe.metrics import read_lines
from fusionrl.observe.run_dir import LOCK_FILE, is_running, other_host
from fusionrl.observe.track.adapters import Tracker

_POLL_S = 2.0


class TrackerError(Exception):
    """A tracker failed; what has arrived is remembered."""


class Sender:
    """Sends lines, and remembers a line when the tracker says that it has arrived: at a flush, or at its close.

    So a line may come twice after a crash, and none is lost. Without a `memory` nothing is remembered.
    """

    def __init__(self, run: Path, kind: str, tracker: Tracker, sent: SentPart, memory: SentState | None) -> None:
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


STATE_FILE = "trackers.json"
TRACKERS_LOCK = "trackers.lock"
_RUN_ID = re.compile(r"[\w-]{1,64}")  # some trackers make a file name of it


@dataclass
class SentPart:
    """The part of a run that one tracker has.

    run_id  of the run there; the tracker's own where it gives one
    bytes   of metrics.jsonl that have arrived
    is_new  there is no run there yet
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    bytes: int = 0
    is_new: bool = True


class SentState:
    """`trackers.json`, for one tracker. Passwords in an address are not part of its key.

    Raises ValueError if another process sends to the same tracker, or the run's folder cannot be written.
    """

    def __init__(self, run: Path, key: str) -> None:
        self._path, self._key = run / STATE_FILE, hide_passwords(key)
        try:
            self._file = os.open(run / TRACKERS_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ValueError(
                f"{run / TRACKERS_LOCK} cannot be written ({error.strerror}): what is sent is kept there"
            ) from error
        # One byte of the lock's file for each tracker, byte 0 for trackers.json itself. Such locks end with their
        # process, and no child inherits them.
        place = 1 + int.from_bytes(hashlib.sha256(self._key.encode()).digest()[:4], "big")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            os.close(self._file)
            raise ValueError(
                f"another fusionrl track sends {run} there ({self._key}); wait for it or stop it"
            ) from error

    def read(self) -> SentPart:
        """Return what has arrived; of a tracker that has nothing yet, a new name for the run there."""
        record = _read(self._path).get(self._key)
        if not isinstance(record, dict) or not isinstance(record.get("bytes"), int):
            return SentPart()
        is_name = _RUN_ID.fullmatch(str(record.get("run_id")))
        return SentPart(record["run_id"], max(record["bytes"], 0), is_new=False) if is_name else SentPart()

    def write(self, sent: SentPart) -> None:
        """Remember what has arrived, of a run that was opened there."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        try:
            state = _read(self._path) | {self._key: {"run_id": sent.run_id, "bytes": sent.bytes}}
            write_atomically(self._path, json.dumps(state, indent=2) + "\n")
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def close(self) -> None:
        os.close(self._file)


def _read(path: Path) -> dict[str, object]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    # A file of an earlier version may have passwords in its keys.
    return {hide_passwords(key): value for key, value in state.items()} if isinstance(state, dict) else {}
