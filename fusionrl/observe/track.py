"""`fusionrl track`: the metrics of a run in W&B, TensorBoard, MLflow, SwanLab or trackio, from metrics.jsonl.

metrics.jsonl is the truth. A tracker is fed from it by a process of its own, so that no fault of a tracker's library or
network touches the run: afterwards, or live (--follow). The command remembers which lines have arrived
(`trackers.json`): a repeated command sends what is new, and a resumed run continues the same run of the tracker.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from fusionrl.base.environment import hide_passwords
from fusionrl.observe.formats import read_object, write_atomically
from fusionrl.observe.metrics import METRICS_FILE, read_lines
from fusionrl.observe.run_dir import LOCK_FILE, is_running, last_config, other_host
from fusionrl.observe.show import find_run
from fusionrl.observe.trackers import ADAPTERS, Target, Tracker, flat_config, open_tracker

_POLL_S = 2.0


class TrackerError(Exception):
    """A tracker failed; what has arrived is remembered."""


class Sender:
    """Sends lines, and remembers a line when the tracker says that it has arrived: at a flush, or at its close.

    So a line may come twice after a crash, and none is lost. Without a `memory` nothing is remembered.
    """

    def __init__(self, run: Path, kind: str, tracker: Tracker, sent: SentPart, memory: SentState | None) -> None:
        self._run, self._kind, self._tracker, self._sent, self._memory = run, kind, tracker, sent, memory
        self._count, self._end = 0, sent.bytes  # lines that the tracker was given, and their end
        sent.run_id = tracker.run_id
        self._remember(sent.bytes)  # the run there, which a second command continues

    def send(self, follow: bool) -> int:
        """Send what is new, with `follow` until the run ends or Ctrl-C; return the number of lines."""
        failures = [_failure_of(partial(self._send_lines, follow)), _failure_of(self._finish)]
        if failure := next(filter(None, failures), None):
            raise TrackerError(
                f"--to {self._kind} failed after {self._count:,} lines: {type(failure).__name__}: {failure};"
                " the same command sends the rest (without --again)"
            ) from failure
        return self._count

    def _send_lines(self, follow: bool) -> None:
        has_ended = False
        with suppress(KeyboardInterrupt):  # what was sent so far shall arrive
            while not has_ended:
                has_ended = not (follow and is_running(self._run))  # asked first: what it wrote last is read below
                start = self._end
                for line in read_lines(self._run, start):
                    self._tracker.log(line)
                    self._count, self._end = self._count + 1, line.end
                if self._end > start and self._tracker.flush():
                    self._remember(self._end)
                if not has_ended:
                    time.sleep(_POLL_S)

    def _finish(self) -> None:
        if self._tracker.flush():
            self._remember(self._end)
        self._tracker.close()
        self._remember(self._end)

    def _remember(self, end: int) -> None:
        self._sent.bytes = end
        if self._memory is not None:
            self._memory.write(self._sent)


def _failure_of(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # each tracker has errors of its own
        return error
    return None


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


STATE_FILE = "trackers.json"
TRACKERS_LOCK = "trackers.lock"
_RUN_ID = re.compile(r"[\w-]{1,64}")  # some trackers make a file name of it


@dataclass
class SentPart:
    """The part of a run that one tracker has."""

    run_id: str = field(default_factory=lambda: secrets.token_hex(4))  # there; the tracker's own where it gives one
    bytes: int = 0  # of metrics.jsonl that have arrived
    is_new: bool = True  # the tracker does not have the run yet


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
    # A file of an earlier version may have passwords in its keys.
    return {hide_passwords(key): value for key, value in (read_object(path) or {}).items()}


# ------------------------------------------------------------------------------------------------ the command
LIVE = frozenset({"prometheus"})  # they hold the newest values alone
_ADDRESS_SENDS = frozenset({"mlflow", "trackio"})  # their --address is a place elsewhere, also with --offline
EXIT_FAILED = 1

_HELP = """Send the metrics of a run to an experiment tracker: afterwards, or with --follow while it goes on. What was
sent is remembered in the run's folder (trackers.json): the command sends what is new, also of a resumed run."""


def main(argv: Sequence[str]) -> int:
    """`fusionrl track [RUN] --to TRACKER …`; returns the exit code, 1 if the tracker fails."""
    options = _parser().parse_args(argv)
    run = find_run(options.run)
    if options.to in LIVE and not options.follow:
        raise ValueError(f"--to {options.to} shows a live run: give --follow")
    if not (run / METRICS_FILE).is_file() and not (options.follow and is_running(run)):
        raise ValueError(f"{run} has no {METRICS_FILE}: no step is finished yet, or it is not a run folder")
    if options.offline and options.address and options.to in _ADDRESS_SENDS:
        raise ValueError(f"--offline with --address: --to {options.to} sends to an address; leave one of the two out")
    try:
        count = _send(run, options)
    except TrackerError as error:
        print(f"error: {hide_passwords(str(error))}", file=sys.stderr)  # a tracker's own words may hold its address
        return EXIT_FAILED
    print(f"{run}: {count:,} lines sent to {options.to}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fusionrl track", description=_HELP)
    parser.add_argument("run", metavar="RUN", nargs="?", help="run folder; default: the newest one under runs/")
    parser.add_argument("--to", choices=list(ADAPTERS), required=True, help="the tracker, whose package is installed")
    parser.add_argument("--project", default="fusionrl", help="project (MLflow: experiment); default: fusionrl")
    parser.add_argument("--name", help="name of the run there; default: that of its folder")
    parser.add_argument("--offline", action="store_true", help="write the tracker's files into the run's folder only")
    addresses = "of the server (wandb, mlflow), folder (tensorboard, swanlab), Space (trackio), HOST:PORT (prometheus)"
    parser.add_argument("--address", default="", help=addresses)
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--again", action="store_true", help="send everything, as a new run there")
    return parser


def _send(run: Path, options: argparse.Namespace) -> int:
    """Send what is new; return the number of lines."""
    key = f"{options.to} {options.project}" + (" offline" if options.offline else "") + f" {options.address}".rstrip()
    with nullcontext() if options.to in LIVE else closing(SentState(run, key)) as memory:
        sent = SentPart() if memory is None or options.again else memory.read()
        if not options.follow and not read_lines(run, sent.bytes):
            return 0  # a run of the tracker is not opened for nothing
        target = Target(
            folder=run,
            project=options.project,
            name=options.name or run.resolve().name,
            run_id=sent.run_id,
            is_new=sent.is_new,
            config=flat_config(last_config(run) or {}),
            offline=options.offline,
            address=options.address,
        )
        if options.follow and (host := other_host(run)) is not None:
            print(
                f"{run} is held by host {host}, whose processes cannot be asked: if that run is dead, this continues"
                f" until {run / LOCK_FILE} is deleted, or until Ctrl-C",
                file=sys.stderr,
                flush=True,
            )
        with until_stopped():
            tracker = open_tracker(options.to, target)
            return Sender(run, options.to, tracker, sent, memory).send(options.follow)
