"""Checkpoints in a run's folder: written under a temporary name, published by one rename, found again by a resume."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step_(\d{6,})")
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint: its folder, and the last rollout whose training it contains."""

    path: Path
    rollout_id: int


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def latest(self) -> Checkpoint | None:
        """The newest finished checkpoint; one without its manifest was never published and does not count."""
        found = [Checkpoint(path, int(manifest["rollout_id"])) for path, manifest in self._finished()]
        return max(found, key=lambda checkpoint: checkpoint.rollout_id, default=None)

    def _finished(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """(folder, manifest) of every checkpoint that was published, in no order."""
        for path in self.folder.glob("step_*"):
            if _NAME.fullmatch(path.name) and (path / _MANIFEST).is_file():
                yield path, json.loads((path / _MANIFEST).read_text(encoding="utf-8"))

    def prune(self, keep: int, best_by: str | None = None) -> list[Path]:
        """Delete all but the newest `keep` checkpoints, and the one whose manifest has the highest `best_by`.

        `best_by` names one of the manifest's `metrics`; a checkpoint without it is not best. Of equal ones the newer
        counts. Returns what was deleted. A checkpoint loses its manifest first, so that a kill on the way leaves none
        that looks complete.
        """
        found: list[tuple[int, float | None, Path]] = [
            (int(manifest["rollout_id"]), manifest.get("metrics", {}).get(best_by) if best_by else None, path)
            for path, manifest in self._finished()
        ]
        found.sort(key=lambda one: one[0])
        scored = [one for one in found if one[1] is not None]
        best = max(scored, key=lambda one: (one[1], one[0]), default=None)
        gone = [one[2] for one in found[:-keep] if one is not best]
        for path in gone:
            (path / _MANIFEST).unlink()
            shutil.rmtree(path)
        return gone

    def publish(self, rollout_id: int, write: Callable[[Path], None], facts: dict[str, Any]) -> Checkpoint:
        """Let `write` fill a temporary folder, add the manifest, and rename it to `step_<finished rollouts>`.

        An exception or a kill on the way leaves every earlier checkpoint as it was.
        """
        final = self.folder / f"step_{rollout_id + 1:06d}"
        temporary = self.folder / f".writing_{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            manifest = {"rollout_id": rollout_id, "time": time.time(), **facts}
            (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if final.exists():  # the same step, saved again by a later attempt
            shutil.rmtree(final)
        temporary.rename(final)
        return Checkpoint(final, rollout_id)
