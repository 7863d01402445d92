"""Checkpoints in a run's folder: written under a temporary name, published by one rename, found again by a resume."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step_(\d{6,})")
_MANIFEST = "manifest.json"
_WRITING = ".writing_"


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint: its folder, the last rollout whose training it contains, and its manifest."""

    path: Path
    rollout_id: int
    manifest: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def latest(self) -> Checkpoint | None:
        """The newest finished checkpoint; one without its manifest was never published and does not count."""
        found = [Checkpoint(path, int(manifest["rollout_id"]), manifest) for path, manifest in self._finished()]
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

    def begin(self, rollout_id: int) -> Path:
        """An empty folder that is to become the checkpoint of `rollout_id`; unfinished ones of earlier attempts go."""
        for left in self.folder.glob(f"{_WRITING}*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary = self.folder / f"{_WRITING}step_{rollout_id + 1:06d}"
        temporary.mkdir(parents=True)
        return temporary

    def publish(self, rollout_id: int, temporary: Path, facts: dict[str, Any]) -> Checkpoint:
        """Add the manifest to the filled folder of `begin` and rename it to `step_<finished rollouts>`.

        A kill on the way leaves every earlier checkpoint as it was.
        """
        final = self.folder / f"step_{rollout_id + 1:06d}"
        manifest = {"step": rollout_id + 1, "rollout_id": rollout_id, "time": time.time(), **facts}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if final.exists():  # the same step, saved again by a later attempt
            shutil.rmtree(final)
        temporary.rename(final)
        return Checkpoint(final, rollout_id, manifest)

    @contextmanager
    def discarding(self, temporary: Path) -> Iterator[None]:
        """Within it an error deletes a folder of `begin`."""
        try:
            yield
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
