"""The manifest in the folder of a pushed version: written by the trainers, read by the engines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fusionrl.base.file_hashes import plain_name
from fusionrl.engines.delta import Encoding

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Change:
    """One tensor of a delta."""

    file: str
    num_changed: int  # elements
    checksum: str  # of the new tensor's bytes


@dataclass(frozen=True)
class Manifest:
    """The contents of a version's folder."""

    version: int
    state: str  # name of these very weights; another run's version of this number has another
    base: str | None  # state that a delta is against; None: the version is full
    encoding: Encoding
    checksum: str  # kind of all checksums
    files: dict[str, str]  # name -> checksum
    changes: dict[str, Change]  # tensor -> its change; those that did not change are left out

    @staticmethod
    def read(folder: str | Path) -> Manifest:
        """The manifest in `folder`.

        Raises:
            RuntimeError: there is none that can be read.
        """
        try:
            raw = json.loads(Path(folder, MANIFEST).read_text(encoding="utf-8"))
            changes = {name: Change(**change) for name, change in raw.pop("changes").items()}
            for name in raw["files"]:
                plain_name(name, MANIFEST)
            return Manifest(**raw, changes=changes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RuntimeError(
                f"{folder} is not a complete version of the weights ({error!r}); --update-weight-disk-dir must name one"
                " folder that the nodes of all trainers and engines see"
            ) from error
