"""The private folder of a run: Ray's files and the stores of process groups, for this user alone."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_MAX_TMPDIR_BYTES = 24  # of the 107 of a socket's path


def make_private_folder() -> Path:
    """A new folder that this user alone can read, by a path that is short enough for Ray's sockets (107 characters)."""
    name = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_TMPDIR_BYTES:
        logger.warning(
            "%s=%s is not used: Ray's sockets leave it at most %d characters, it has %d; Ray's files go to /tmp",
            *(name, parent, _MAX_TMPDIR_BYTES, len(os.fsencode(parent))),
        )
        parent = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="fusionrl-", dir=parent))
    for name in ("ray", "stores"):
        (folder / name).mkdir(mode=0o700)
    return folder
