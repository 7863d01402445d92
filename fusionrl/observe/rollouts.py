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

_NAME = re.compile(r"step_(?P<step>\d{6,})\.(?P<kind>[A-Za-z0-9][\w-]*)\.a(?P<attempt>\d+)\.jsonl")
_EARLIER_NAME = re.compile(r"(?P<kind>[A-Za-z0-9][\w-]*)_(?P<rollout_id>\d{6,})\.a(?P<attempt>\d+)\.jsonl")
_KIND = re.compile(r"[A-Za-z0-9][\w-]*")
EVAL_KIND = "eval-"  # kind of an evaluation's samples: this, and the set's name


def step_of(number: int, kind: str) -> int:
    """The step of a rollout that hooks know by `number`: they count rollouts from 0, steps count finished ones.

    An evaluation is numbered by the step that it follows.
    """
    return number if kind.startswith(EVAL_KIND) else number + 1


@dataclass(frozen=True, order=True)
class RolloutFile:
    """One finished rollout file, and what its name says of it."""

    rollout_id: int  # as hooks know it
    kind: str
    attempt: int
    path: Path

    @property
    def step(self) -> int:
        """The step of metrics.jsonl that the file belongs to."""
        return step_of(self.rollout_id, self.kind)

    @classmethod
    def named(cls, path: Path) -> RolloutFile | None:
        """The file at `path`, by its name; None for a file of another kind."""
        if match := _NAME.fullmatch(path.name):
            number = int(match["step"]) - step_of(0, match["kind"])
        elif match := _EARLIER_NAME.fullmatch(path.name):
            number = int(match["rollout_id"])
        else:
            return None
        return cls(number, match["kind"], int(match["attempt"]), path)

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
    found.sort(key=lambda file: (file.step, file.kind.startswith(EVAL_KIND), file.kind, file.attempt))
    if all_attempts:
        return found
    # Sorted by attempt last, so that the highest is the one that stays.
    return list({(file.rollout_id, file.kind): file for file in found}.values())


def read_rollouts(run_dir: Path, kind: str | None = None, all_attempts: bool = False) -> Iterator[dict[str, Any]]:
    """The samples of a run, lazily, with "step", "rollout_id", "kind", "attempt" where they have none."""
    for file in list_rollouts(run_dir, kind, all_attempts):
        for row in file.rows():
            found = {"step": file.step, "rollout_id": file.rollout_id, "kind": file.kind, "attempt": file.attempt}
            yield {**found, **row}


def rollout_of_step(run_dir: Path, step: int | None = None, kind: str = "train") -> RolloutFile:
    """The file with the samples of a step (None: the last one that has any), of its highest attempt.

    Raises:
        ValueError: there is none; says which steps have samples.
    """
    files = {file.step: file for file in list_rollouts(run_dir, kind)}
    if not files:
        raise ValueError(f"{run_dir} has no samples of kind {kind!r}")
    wanted = max(files) if step is None else step
    if wanted not in files:
        raise ValueError(f"--step {step}: {run_dir} has samples of step{'s' * (len(files) > 1)} {as_ranges(files)}")
    return files[wanted]


def as_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers, shortened: 1, 2, 3, 7 → "1-3, 7"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
