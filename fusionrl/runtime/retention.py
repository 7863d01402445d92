"""What a long run keeps: samples of its newest steps (--keep-rollouts), and logs up to a size (--max-log-mb).

A resume reads a checkpoint, the metrics and the schedules, which stay whole. Samples of steps since the newest
checkpoint stay, too: what recovers within the run may train on them again.
"""

import logging
import os
import time
from pathlib import Path

from fusionrl.config.config import Config
from fusionrl.config.run_parts import saves
from fusionrl.observe.rollouts import list_rollouts, trained_file
from fusionrl.runtime.checkpoints import Checkpoints

logger = logging.getLogger(__name__)

_LOOK_S = 30.0  # between two looks at the logs


class Retention:
    """Tidies the folder of a run after each step, as the flags say."""

    def __init__(self, config: Config, path: Path) -> None:
        self._path, self._keep = path, config.run.keep_rollouts
        self._saves = saves(config) and not config.checkpoint.no_save
        self._max_bytes = None if config.run.max_log_mb is None else config.run.max_log_mb * 2**20
        self._next_look = 0.0

    def after_step(self, step: int) -> None:
        """Delete and shorten what is not to be kept after `step`."""
        try:
            if self._keep is not None:
                prune_rollouts(self._path, self._last_to_go(step))
            if self._max_bytes is not None and time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + _LOOK_S
                for log in (self._path / "logs").glob("*.log"):
                    shorten_log(log, self._max_bytes)
        except OSError as error:  # the run is worth more than its tidiness
            logger.warning("the run's folder could not be tidied (--keep-rollouts, --max-log-mb): %s", error)

    def _last_to_go(self, step: int) -> int:
        assert self._keep is not None
        if not self._saves:
            return step - self._keep
        finished = Checkpoints(self._path / "checkpoints").finished()
        return min(step - self._keep, int(finished[0].name.partition("_")[2]) if finished else 0)


def prune_rollouts(run_dir: Path, last_step: int) -> list[Path]:
    """Delete the samples of the steps up to `last_step`, of every kind and attempt. Returns what was deleted."""
    files = [file.path for file in list_rollouts(run_dir, all_attempts=True) if file.step <= last_step]
    for path in files:
        for part in (trained_file(path), path):
            part.unlink(missing_ok=True)
    return files


def shorten_log(log: Path, max_bytes: int) -> bool:
    """Leave out the middle of a log that is larger than `max_bytes`: its first and its last quarter stay.

    Processes may append to it meanwhile, as their descriptors have O_APPEND. What they write between the reading of the
    end and the cut, some microseconds, is lost.
    """
    quarter = max_bytes // 4
    with log.open("r+b") as file:
        if os.fstat(file.fileno()).st_size <= max_bytes:
            return False
        head = file.read(quarter)
        head = head[: head.rfind(b"\n") + 1]
        file.seek(-quarter, os.SEEK_END)
        tail = file.read()
        tail = tail[tail.find(b"\n") + 1 :]
        size = file.tell()
        file.truncate(len(head))
    note = f"[{size - len(head) - len(tail):,} bytes left out here: --max-log-mb]\n"
    with log.open("ab") as file:
        file.write(note.encode() + tail)
    return True
