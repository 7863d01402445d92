"""Files in the user's cache folder, for this user alone; folders that appear complete; sizes and hashes of files.

The hashes of a checkpoint find what was damaged, cut off, exchanged or left out. They are not a signature: who can
write the files can write their hashes too, so what reads the files trusts none of them (`fusionrl.trainer.safe_load`).
"""

import errno
import hashlib
import importlib.util
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

from fusionrl.base.wording import install_hint

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


# What is said of folders and devices that cannot be flushed, or not by this user.
_NO_FLUSH = {errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


def publish_folder(written: Path, final: Path) -> None:
    """Rename a folder when the disk holds all of its files: after a power cut no file under the final name is short.

    Raises OSError if the disk fails, or `final` is there already and not empty.
    """
    flush((*written.rglob("*"), written))
    rename_flushed(written, final)


def flush(paths: Iterable[Path]) -> None:
    """Wait until the disk holds these files, and the names in these folders. Raises OSError if it fails."""
    for path in paths:
        if not path.is_symlink():
            descriptor = _opened(path)
            try:
                flush_open(descriptor)
            finally:
                os.close(descriptor)


def rename_flushed(old: Path, new: Path) -> None:
    """Rename what is flushed, and flush its new name. Raises OSError if it cannot be renamed, or the disk fails."""
    parent = _opened(new.parent)  # first: what fails here leaves all as it was
    try:
        old.rename(new)
        flush_open(parent)
    finally:
        os.close(parent)


def flush_open(descriptor: int) -> None:
    """`os.fsync` of what can be flushed. Raises OSError if the disk fails."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH or stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise


def _opened(path: Path) -> int:
    # SMB flushes no file that is open for reading alone. A folder that may not be read has no flush.
    best, next_best = (os.O_RDONLY, os.O_PATH) if path.is_dir() else (os.O_RDWR, os.O_RDONLY)
    try:
        return os.open(path, best)
    except PermissionError:
        return os.open(path, next_best)


R = TypeVar("R")

FAST, ALWAYS_THERE = "xxh3-128", "sha256"
_BLOCK = 1 << 20
_MAX_THREADS = 8

Facts = dict[str, list[int | str]]
"""File name → [bytes, hash]; the hash is "<kind>:<hexadecimal>"."""


@dataclass(frozen=True)
class Written(Generic[R]):
    """The files that one rank has written: facts for Megatron's finalisation, and the files' sizes and hashes."""

    reports: dict[int, R] = field(default_factory=dict)
    files: Facts = field(default_factory=dict)


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def plain_name(name: object, where: str) -> str:
    """`name` if it is the name of a file in the folder itself. Raises ValueError if it is not a string, or leads
    elsewhere; begins with `where`."""
    if not isinstance(name, str) or not name or name in (".", "..") or len(name) > 255 or set(name) & {"/", "\\", "\0"}:
        raise ValueError(f"{where}: {str(name)[:80]!r} is not the name of a file in this folder")
    return name


def hash_kind() -> str:
    """The hash of new files: xxh3-128 where the package xxhash is installed, which is ten times as fast as sha256."""
    return FAST if importlib.util.find_spec("xxhash") is not None else ALWAYS_THERE


def hash_file(path: Path, kind: str) -> str:
    """The file's hash, as in `Facts`. Raises OSError if it cannot be read or is a symbolic link; ValueError for an
    unknown kind, or one whose package is not installed."""
    digest = _new_hash(kind)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is no regular file")
        while block := file.read(_BLOCK):
            digest.update(block)
    return f"{kind}:{digest.hexdigest()}"


def _new_hash(kind: str) -> _Digest:
    if kind == ALWAYS_THERE:
        return hashlib.sha256()
    if kind != FAST:
        raise ValueError(f"the hash {kind[:40]!r} is unknown")
    try:
        import xxhash
    except ImportError as error:
        cure = install_hint("xxhash")
        raise ValueError(f"the package xxhash makes its hashes, and is not installed; {cure}") from error
    return xxhash.xxh3_128()


def facts_of(folder: Path, names: Iterable[str]) -> Facts:
    kind = hash_kind()
    return {name: [(folder / name).stat().st_size, hash_file(folder / name, kind)] for name in names}


def check_facts(folder: Path, facts: object, where: str) -> None:
    """Compare files of `folder` with their `Facts`, several at a time. `facts`: as read from JSON, so perhaps anything.

    Raises ValueError, which begins with `where`, if a file is missing, not regular, or has another size or hash, or
    `facts` are malformed.
    """
    if not isinstance(facts, Mapping) or not facts:
        raise ValueError(f"{where}: it lists no files with hashes (it was changed, or is incomplete)")
    saved: list[tuple[str, int, str]] = []
    for name, fact in facts.items():
        plain_name(name, where)
        if not (
            isinstance(fact, list)
            and len(fact) == 2
            and type(fact[0]) is int
            and isinstance(fact[1], str)
            and ":" in fact[1]
        ):
            raise ValueError(f"{where}: its entry for {name} is not a size and hash")
        saved.append((name, *fact))

    def check(file: tuple[str, int, str]) -> str | None:
        name, size, expected_hash = file
        path = folder / name
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is a link or no file"
            if status.st_size != size:
                return f"{name} has {status.st_size} bytes, it was saved with {size}"
            actual_hash = hash_file(path, expected_hash.partition(":")[0])
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name}: {error}"
        return None if actual_hash == expected_hash else f"{name} is not what was saved"

    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, len(saved))) as pool:
        wrong = [text for text in pool.map(check, saved) if text is not None]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(f"{where}: {wrong[0]}{more}")


def sampled_hash(paths: Sequence[Path], num_blocks: int = 2048, block_size: int = 512) -> str:
    """Return one hash of the sizes of files and of blocks spread over them: milliseconds for weights of any size.

    If other weights differ in a twentieth of the files, in whichever tensors, their hash almost certainly does too.
    Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    num_blocks = max(num_blocks // max(len(paths), 1), 16)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(str(size).encode())
            for number in range(num_blocks):
                digest.update(
                    os.pread(file.fileno(), block_size, max(size - block_size, 0) * number // (num_blocks - 1))
                )
    return digest.hexdigest()
