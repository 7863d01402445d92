"""Rollouts on disk: a file a rollout, a JSON line a sample, written whole or not at all, and never
overwritten.

`<run_dir>/rollouts/step_<step>.<kind>.a<attempt>.jsonl`, kind being "train", "eval-<set>" or a name of the caller's.
`step` is that of metrics.jsonl, of eval/<step>.json and of checkpoints/step_<step>: the number of finished rollouts. So
`step_000003.train.a1.jsonl` has the samples that the line of step 3 was trained on, which hooks know as rollout_id 2.

Runs of earlier versions have `<kind>_<number>.a<attempt>.jsonl`, numbered by rollout_id; they are read as well.
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

TRAIN = "train"

_NAME = re.compile(r"step_(?P<step>\d{6,})\.(?P<kind>[A-Za-z0-9][\w-]*)\.a(?P<attempt>\d+)\.jsonl")
_EARLIER_NAME = re.compile(r"(?P<kind>[A-Za-z0-9][\w-]*)_(?P<rollout_id>\d{6,})\.a(?P<attempt>\d+)\.jsonl")
_KIND = re.compile(r"[A-Za-z0-9][\w-]*")


def step_of(rollout_id: int, kind: str = TRAIN) -> int:
    """The step of a rollout: hooks count rollouts from 0, steps count finished ones.

    An evaluation is given the step that it follows as its rollout_id.
    """
    return rollout_id + 1 if kind == TRAIN else rollout_id


@dataclass(frozen=True)
class RolloutFile:
    """One finished rollout file, and what its name says of it."""

    step: int
    kind: str
    attempt: int
    path: Path

    @property
    def rollout_id(self) -> int:
        """What hooks were given as rollout_id."""
        return self.step - step_of(0, self.kind)

    @classmethod
    def named(cls, path: Path) -> RolloutFile | None:
        """The file at `path`, by its name; None for a file of another kind."""
        if match := _NAME.fullmatch(path.name):
            return cls(int(match["step"]), match["kind"], int(match["attempt"]), path)
        if match := _EARLIER_NAME.fullmatch(path.name):
            step = step_of(int(match["rollout_id"]), match["kind"])
            return cls(step, match["kind"], int(match["attempt"]), path)
        return None

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
        """Write the samples of one rollout (its id as hooks know it, see `step_of`) and return the file's path.

        Arrays and tensors become lists, NaN and infinities null, objects JSON does not know their `repr`. The
        file appears under its name only when it is complete; if `rows` raises, nothing is left behind. Raises
        FileExistsError if this attempt has already written this rollout, ValueError for a kind that cannot
        stand in a file name.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"rollout kind {kind!r} is no file name; use letters, digits, '_', '-'")
        path = self.folder / f"step_{step_of(rollout_id, kind):06d}.{kind}.a{attempt}.jsonl"
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
    """The rollout files of a run by step, at each step training first; of each the highest attempt, or all."""
    found: list[RolloutFile] = []
    folder = Path(run_dir) / "rollouts"
    for path in folder.iterdir() if folder.is_dir() else ():
        file = RolloutFile.named(path)
        if file is not None and kind in (None, file.kind):
            found.append(file)
    found.sort(key=lambda file: (file.step, file.kind != TRAIN, file.kind, file.attempt))
    if all_attempts:
        return found
    # Sorted by attempt last, so that the highest is the one that stays.
    return list({(file.step, file.kind): file for file in found}.values())


def find_rollout(run_dir: Path, step: int, kind: str = TRAIN) -> RolloutFile:
    """The file of a step, of its highest attempt.

    Raises:
        ValueError: there is none; names the steps that have one.
    """
    files = list_rollouts(run_dir, kind)
    for file in files:
        if file.step == step:
            return file
    steps = f"steps {files[0].step} to {files[-1].step}" if files else "no step"
    raise ValueError(f"{run_dir}: no {kind} rollout of step {step}; there are files of {steps} in its folder rollouts")


def read_rollouts(run_dir: Path, kind: str | None = None, all_attempts: bool = False) -> Iterator[dict[str, Any]]:
    """The samples of a run, lazily, with "step", "rollout_id", "kind", "attempt" where they have none."""
    for file in list_rollouts(run_dir, kind, all_attempts):
        for row in file.rows():
            found = {"step": file.step, "rollout_id": file.rollout_id, "kind": file.kind, "attempt": file.attempt}
            yield {**found, **row}
