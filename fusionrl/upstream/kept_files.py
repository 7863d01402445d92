"""JSON files in the user's cache folder, for this user alone: answers that take longer to find out than to read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def kept_path(name: str, facts: Iterable[str]) -> Path:
    """Return the file of an answer that is valid for these facts, and for this Python.

    Raises:
        RuntimeError: the user has no home.
    """
    digest = hashlib.sha256(sys.version.encode())
    for fact in facts:
        digest.update(f" {fact}".encode(errors="surrogateescape"))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusionrl"
    return folder / f"{name}-{digest.hexdigest()[:24]}.json"


def file_fact(path: str | Path, facts: os.stat_result) -> str:
    """Return the fact that a file is as it was: another size or time is another file."""
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"


def read_kept(path: Path) -> Json:
    """Return the answer in a file of this user's that nobody else may write; None: there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, encoding="utf-8") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
                return None
            found: Json = json.load(file)
    except (OSError, ValueError):
        return None
    return found


def write_kept(path: Path, answer: object) -> None:
    """Keep an answer.

    Raises:
        OSError, TypeError, ValueError: the file cannot be written, or the answer is no JSON.
    """
    text = json.dumps(answer)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.")  # for this user alone
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
