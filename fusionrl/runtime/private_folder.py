"""The private folder of a run: Ray's files and the stores of process groups, for this user alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fusionrl.base.socket_folder import socket_folder

_MAX_TMPDIR_BYTES = 24  # of the 107 of a socket's path


def make_private_folder() -> Path:
    """A new folder that this user alone can read, by a path that is short enough for Ray's sockets (107 characters)."""
    parent = socket_folder(_MAX_TMPDIR_BYTES, "Ray's files are", "RAY_TMPDIR")
    folder = Path(tempfile.mkdtemp(prefix="fusionrl-", dir=parent))
    for name in ("ray", "stores"):
        (folder / name).mkdir(mode=0o700)
    return folder
