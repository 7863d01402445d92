"""Rollouts on disk: a file a rollout, a JSON line a sample, written whole or not at all, and never
overwritten.

`<run_dir>/rollouts/<kind>_<rollout_id>.a<attempt>.jsonl`, kind being "train", "eval" or a name of the
caller's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionrl.observe.values import json_line

_NAME = re.compile(r"(?P<kind>[A-Za-z0-9][\w-]*)_(?P<id>\d{6,})\.a(?P<attempt>\d+)\.jsonl")
_KIND = re.compile(r"[A-Za-z0-9][\w-]*")


@dataclass(frozen=True, order=True)
class RolloutFile:
    """One finished rollout file, and what its name says of it."""

    rollout_id: int
    kind: str
    attempt: int
    path: Path

    def rows(self) -> Iterator[dict[str, Any]]:
        """The samples, one dictionary each, as they were written."""
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


class RolloutWriter:
    """Writes `run_dir/rollouts/`; makes the folder."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = Path(run_dir) / "rollouts"
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, rollout_id: int, attempt: int, rows: Iterable[Mapping[str, Any]], kind: str = "train") -> Path:
        """Write the samples of one rollout and return the file's path.

        Arrays and tensors become lists, NaN and infinities null, objects JSON does not know their `repr`. The
        file appears under its name only when it is complete; if `rows` raises, nothing is left behind. Raises
        FileExistsError if this attempt has already written this rollout, ValueError for a kind that cannot
        stand in a file name.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"rollout kind {kind!r} is no file name; use letters, digits, '_', '-'")
        path = self.folder / f"{kind}_{rollout_id:06d}.a{attempt}.jsonl"
        if path.exists():
            raise FileExistsError(f"{path} exists; rollouts are never overwritten, a resume raises the attempt")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                for row in rows:
                    file.write(json_line(row))
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path


def list_rollouts(run_dir: Path, kind: str | None = None, all_attempts: bool = False) -> list[RolloutFile]:
    """The rollout files of a run, in order; of each rollout the highest attempt unless `all_attempts`."""
    found: list[RolloutFile] = []
    folder = Path(run_dir) / "rollouts"
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and kind in (None, match["kind"]):
            found.append(RolloutFile(int(match["id"]), match["kind"], int(match["attempt"]), path))
    found.sort()
    if all_attempts:
        return found
    # Sorted by attempt last, so that the highest is the one that stays.
    return list({(file.rollout_id, file.kind): file for file in found}.values())


def read_rollouts(run_dir: Path, kind: str | None = None, all_attempts: bool = False) -> Iterator[dict[str, Any]]:
    """The samples of a run, lazily, with "rollout_id", "kind", "attempt" where they have none."""
    for file in list_rollouts(run_dir, kind, all_attempts):
        for row in file.rows():
            yield {"rollout_id": file.rollout_id, "kind": file.kind, "attempt": file.attempt, **row}
