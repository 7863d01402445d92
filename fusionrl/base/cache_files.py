"""Files in the user's cache folder, for this user alone, of what takes longer to find out than to read."""

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def cache_path(name: str, facts: Iterable[str]) -> Path:
    """Return the file of an answer that is valid for these facts, and for this Python. Raises RuntimeError if the user
    has no home."""
    digest = hashlib.sha256(sys.version.encode())
    for fact in facts:
        digest.update(f" {fact}".encode(errors="surrogateescape"))
    return cache_folder() / f"{name}-{digest.hexdigest()[:24]}.json"


def cache_folder() -> Path:
    """Return the folder of fusionrl in the user's cache. Raises RuntimeError if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusionrl"


def file_fact(path: str | Path, facts: os.stat_result) -> str:
    """Return the fact that a file is as it was: another size or time is another file."""
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"


def open_kept(path: Path) -> BinaryIO:
    """Open a file that only this user may write. Raises OSError if there is none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        os.close(descriptor)
        raise PermissionError(f"{path}: not a file of this user's alone")
    return os.fdopen(descriptor, "rb")


def read_cache(path: Path) -> Json:
    """Return the answer in a file that only this user may write; None without one."""
    try:
        with open_kept(path) as file:
            content: Json = json.load(file)
    except (OSError, ValueError):
        return None
    return content


def write_cache(path: Path, answer: object) -> None:
    """Keep an answer. Raises OSError, TypeError, ValueError if the file cannot be written, or the answer is not
    JSON."""
    write_bytes(path, json.dumps(answer).encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file for this user alone: readers find what was there before, or all of it. Raises OSError if the file
    cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.")  # for this user alone
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
