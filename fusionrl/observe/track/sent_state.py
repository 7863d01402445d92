"""Memory of what was sent to which tracker: `trackers.json` of a run's folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fusionrl.base.environment import hide_passwords
from fusionrl.observe.json_values import write_atomically

STATE_FILE = "trackers.json"
LOCK_FILE = "trackers.lock"
_RUN_ID = re.compile(r"[\w-]{1,64}")  # some trackers make a file name of it


@dataclass
class Sent:
    """The part of a run that one tracker has.

    run_id  of the run there; the tracker's own where it gives one
    bytes   of metrics.jsonl that have arrived
    is_new  there is no run there yet
    """

    run_id: str
    bytes: int = 0
    is_new: bool = True


def new_sent() -> Sent:
    """Return a new name for a run of which nothing was sent."""
    return Sent(secrets.token_hex(4))


class Memory:
    """`trackers.json`, for one tracker. Passwords in an address are not part of its key.

    Raises ValueError if another process sends to the same tracker, or the run's folder cannot be written.
    """

    def __init__(self, run: Path, key: str) -> None:
        self._path, self._key = run / STATE_FILE, hide_passwords(key)
        try:
            self._file = os.open(run / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ValueError(
                f"{run / LOCK_FILE} cannot be written ({error.strerror}): what is sent is kept there"
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

    def read(self) -> Sent:
        """Return what has arrived; of a tracker that has nothing yet, a new name for the run there."""
        record = _read(self._path).get(self._key)
        if (
            isinstance(record, dict)
            and isinstance(record.get("bytes"), int)
            and _RUN_ID.fullmatch(str(record.get("run_id")))
        ):
            return Sent(record["run_id"], max(record["bytes"], 0), is_new=False)
        return new_sent()

    def write(self, sent: Sent) -> None:
        """Remember what has arrived, of a run that was opened there."""
        with self._alone():
            state = _read(self._path) | {self._key: {"run_id": sent.run_id, "bytes": sent.bytes}}
            write_atomically(self._path, json.dumps(state, indent=2) + "\n")

    def close(self) -> None:
        """Let another process send."""
        os.close(self._file)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)


def _read(path: Path) -> dict[str, object]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    # A file of an earlier version may have passwords in its keys.
    return {hide_passwords(key): value for key, value in state.items()} if isinstance(state, dict) else {}
