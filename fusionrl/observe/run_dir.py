"""The folder of one run: made, locked, and continued by a resume without a file being overwritten.

config.json  plan.txt      of attempt 1; config.a2.json, plan.a2.txt of a resume whose own differ
metrics.jsonl              see `metrics`
schedule.a<attempt>.jsonl  order of a pipeline's events, see `fusionrl.buffer.schedule`
rollouts/ checkpoints/ logs/
timeline/                  see `spans`
run.lock                   who is at work here: pid, start time of that process, host
engines.txt                addresses of the engines that others start for the run; `fusionrl engines` writes it
engines.json               what has become of each of them, as the run writes it
exported.txt               the folder that --save-hf wrote, until the run ends
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NotRequired, Self, TypedDict
from urllib.parse import urlsplit

from fusionrl.base.environment import hide_passwords
from fusionrl.observe.formats import read_object, to_jsonable, write_atomically
from fusionrl.observe.metrics import next_attempt

LOCK_FILE = "run.lock"
CONFIG_FILE = "config.json"  # of the first attempt: with it a folder holds a run
_EXPORT_FILE = "exported.txt"
SUB_FOLDERS = ("rollouts", "checkpoints", "logs")
LINKED_FOLDERS = (*SUB_FOLDERS, "weights", "timeline")  # a user may put them on another disk, by a link


def umask_of(mode: str) -> int:
    """The umask by which new folders have `mode` (octal digits, as --run-dir-mode takes them), and files no more."""
    return 0o777 & ~int(mode, 8)


class RunDir:
    """A run's folder, held under a lock from construction to `close`.

    Attributes: `path`; `rollouts`, `checkpoints`, `logs` (its sub folders); `attempt` (1 for a new run).
    """

    def __init__(self, path: Path | str, resume: bool = False, mode: int | None = None) -> None:
        """Make or reopen the folder and take its lock, also from a dead process.

        mode  the folder gets it, if it is new or holds a run; another folder of the user keeps its own

        Raises:
            ValueError: it is not a folder, holds a run and `resume` is False, is held by a live process (or one of
                another machine, which cannot be asked), or has a link in it by which the run would read or write
                elsewhere; this user's links to folders in `LINKED_FOLDERS` may be there.
        """
        self.path = Path(path)
        _refuse_file(self.path)
        is_ours = not self.path.exists() or (self.path / CONFIG_FILE).is_file()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _Lock(self.path / LOCK_FILE)
        self._lock.acquire()
        try:
            _refuse_content(self.path, resume)
            self.attempt = next_attempt(self.path)
        except ValueError:
            self._lock.release()
            raise
        if mode is not None and is_ours and os.stat(self.path).st_uid == os.getuid():
            os.chmod(self.path, mode)
        for name in SUB_FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        self.rollouts, self.checkpoints, self.logs = (self.path / name for name in SUB_FOLDERS)

    @staticmethod
    def check(path: Path, resume: bool) -> None:
        """Raise the ValueError that the constructor would raise, and change nothing in the folder."""
        _refuse_file(path)
        if path.is_dir():
            _Lock(path / LOCK_FILE).check()
            _refuse_content(path, resume)

    def write_config(self, config: Mapping[str, object]) -> Path:
        """Write the resolved configuration, less passwords in URLs, and return the file that holds it.

        A resume whose configuration equals the last one written adds no file.
        """
        text = json.dumps(to_jsonable(config), indent=2, ensure_ascii=False) + "\n"
        return self._write("config", "json", hide_passwords(text))

    def write_plan(self, text: str) -> Path:
        """Write what the run is going to do, as `--dry-run` prints it; returns the file that holds it."""
        return self._write("plan", "txt", hide_passwords(text if text.endswith("\n") else text + "\n"))

    def _write(self, stem: str, suffix: str, text: str) -> Path:
        last = _last_version(self.path, stem, suffix)
        if last is not None and last.read_text(encoding="utf-8", errors="replace") == text:
            return last
        path = self.path / (f"{stem}.{suffix}" if self.attempt == 1 else f"{stem}.a{self.attempt}.{suffix}")
        assert not path.exists(), f"{path} written twice in attempt {self.attempt} with different contents"
        write_atomically(path, text)
        return path

    def close(self) -> None:
        """Give the lock back; safe to call twice."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_running(path: Path) -> bool:
    """Return whether a live process, or one of another machine, which cannot be asked, holds a run's folder."""
    holder = _holder(path)
    return holder is not None and (other_host(path) is not None or _alive(holder))


def other_host(path: Path) -> str | None:
    """Return the host that holds a run's folder where it is another machine, which cannot be asked."""
    holder = _holder(path)
    return None if holder is None or holder.get("host") == socket.gethostname() else str(holder.get("host"))


def _holder(path: Path) -> _Holder | None:
    try:
        return _parse((path / LOCK_FILE).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def last_config(path: Path) -> dict[str, object] | None:
    """Return the newest config.json of a run's folder; None where there is none that can be read."""
    file = last_config_file(path)
    return None if file is None else read_object(file)


def last_config_file(path: Path) -> Path | None:
    """Return the file of the newest attempt's configuration: config.json, or config.a<n>.json of a resume."""
    return _last_version(path, "config", "json") if path.is_dir() else None


def holds_run(path: Path) -> bool:
    """Return whether a folder is that of a run; a model's folder has a config.json, too."""
    return last_config_file(path) is not None and (path / LOCK_FILE).is_file()


def own_config_file(path: Path) -> Path | None:
    """Return `last_config_file` where it is this user's and no link: its flags may name functions, which run."""
    file = last_config_file(path)
    facts = None if file is None else file.lstat()
    return file if facts and stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() else None


def note_export(path: Path, folder: Path, last_rollout: int) -> None:
    """Note that the weights after this rollout are in this folder of --save-hf."""
    write_atomically(path / _EXPORT_FILE, _export_text(folder, last_rollout))


def exported_rollout(path: Path, folder: Path) -> int | None:
    """Return the rollout after which the run wrote this folder, and then died; None: it did not, or has no checkpoint
    of it."""
    try:
        noted = (path / _EXPORT_FILE).read_text(encoding="utf-8", errors="replace")
        last = int(noted.partition(" ")[0])
        is_noted = noted == _export_text(folder, last)
    except (OSError, ValueError):
        return None
    return last if is_noted and (path / "checkpoints" / f"step_{last + 1:06d}").is_dir() else None


def forget_export(path: Path) -> None:
    """Remove the note: the run is at its end."""
    (path / _EXPORT_FILE).unlink(missing_ok=True)


def _export_text(folder: Path, last_rollout: int) -> str:
    return f"{last_rollout} {folder.stat().st_ino} {folder.resolve()}\n"  # another folder may have the name by now


def _refuse_file(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"--run-dir {path} is a file; name a folder")


def _refuse_content(path: Path, resume: bool) -> None:
    if not resume and _has_content(path):
        raise ValueError(
            f"--run-dir {path} already holds a run: pass --resume to go on with it, "
            "or another --run-dir to start a new one"
        )
    for folder in (path, *(path / name for name in LINKED_FOLDERS)):
        if not folder.is_symlink() and not folder.exists():
            continue
        if folder is not path and not folder.is_dir():
            raise ValueError(f"--run-dir {path}: {folder.name} is not a folder; remove it")
        with os.scandir(folder) as entries:  # these know their kinds: a temporary file may be gone by now
            found = [entry for entry in entries if not entry.is_file(follow_symlinks=False)]
        for entry in (folder / entry.name for entry in found if not entry.is_dir(follow_symlinks=False)):
            if not (folder is path and entry.name in LINKED_FOLDERS and _is_own_link(entry)):
                raise ValueError(
                    f"--run-dir {path}: {entry.relative_to(path)} is a link or a special file; the"
                    " run would read or write elsewhere by it: remove it"
                )


def _is_own_link(path: Path) -> bool:
    """Return whether it is a link of this user to a folder of this user."""
    return path.is_symlink() and path.is_dir() and path.lstat().st_uid == path.stat().st_uid == os.getuid()


def _has_content(path: Path) -> bool:
    """Return whether anything was written; a start that failed leaves only empty subfolders."""
    return not all(
        entry.name == LOCK_FILE or (entry.name in LINKED_FOLDERS and entry.is_dir() and not any(entry.iterdir()))
        for entry in path.iterdir()
    )


def _last_version(folder: Path, stem: str, suffix: str) -> Path | None:
    pattern = re.compile(rf"{stem}(?:\.a(\d+))?\.{suffix}")
    versions = [(int(match[1] or 1), entry) for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name))]
    return max(versions)[1] if versions else None


class _Lock:
    """A lock file naming its holder by pid, the start time of that process (pids are used again) and host.

    The holder is recorded rather than an flock kept, which a fork of the run would inherit and hold after the run has
    died. flock only makes the look-then-write below atomic.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mine: _Holder = {"pid": os.getpid(), "started": _start_time(os.getpid()), "host": socket.gethostname()}

    def acquire(self) -> None:
        with self._exclusive() as file:
            self._refuse_holder(_parse(file.read()))
            _replace(file, json.dumps(self._mine))

    def check(self) -> None:
        """Raise ValueError if another process holds the folder, as `acquire` would; write nothing."""
        if self.path.is_file() and not self.path.is_symlink():
            self._refuse_holder(_parse(self.path.read_text(encoding="utf-8", errors="replace")))

    def _refuse_holder(self, holder: _Holder | None) -> None:
        if holder is not None and holder.get("host") != self._mine["host"]:
            raise ValueError(
                f"--run-dir {self.path.parent} is held by process {holder.get('pid')} on "
                f"host {holder.get('host')}; if that run is dead, delete {self.path}, "
                "else choose another --run-dir"
            )
        if holder is not None and _alive(holder):
            raise ValueError(
                f"--run-dir {self.path.parent} is in use by the live process {holder['pid']}; "
                "wait for it or stop it, or choose another --run-dir"
            )

    def release(self) -> None:
        if not self.path.exists():
            return
        with self._exclusive() as file:
            # Emptied, not unlinked: unlinking would let a waiter lock a file that no longer has a name. A fork of the
            # holder has another pid, so it cannot release its parent's lock.
            if self._mine == _parse(file.read()) and os.getpid() == self._mine["pid"]:
                _replace(file, "")

    @contextmanager
    def _exclusive(self) -> Iterator[IO[str]]:
        try:  # not through a link, whose target would be emptied
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise ValueError(f"--run-dir {self.path.parent}: {self.path.name} cannot be opened ({error})") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"--run-dir {self.path.parent}: {self.path.name} is not a file; remove it")
        with os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


class _Holder(TypedDict):
    pid: int
    started: NotRequired[str | None]
    host: NotRequired[str]


def _replace(file: IO[str], text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def _parse(text: str) -> _Holder | None:
    """The holder a lock file names; None if free. A process that died while writing leaves half a record."""
    try:
        holder = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(holder, dict) and type(holder.get("pid")) is int and 0 < holder["pid"] < 2**31
    return holder if is_record else None


def _alive(holder: _Holder) -> bool:
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # Somebody else's process, but a live one.
    return _start_time(holder["pid"]) == holder.get("started")


def _start_time(pid: int) -> str | None:
    """Return the start of the process as "<boot id>/<clock ticks since boot>"; None where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        facts = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command, in parentheses, may hold blanks; fields 3 and 22 of proc(5) are the 1st and the 20th after it.
    fields = facts.rpartition(")")[2].split()
    return None if fields[0] == "Z" else f"{boot}/{fields[19]}"  # a zombie only waits for its parent to notice


WANTED, STATES = "engines.txt", "engines.json"
_HEAD = "# Addresses of engines that others have started, one a line. A line that goes lets its engine go.\n"
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class EngineState(TypedDict):
    """One engine: its state is "own", "joining", "ready", "serving", "leaving", "gone", "lost" or "refused"."""

    url: str
    state: str
    note: str


def engine_url(address: str) -> str:
    """Return `http://host:port` of an address, with or without the beginning; ValueError for anything else."""
    text = address.strip().rstrip("/")
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname or "", parts.port
        is_host = bool(_HOST.fullmatch(host)) or ipaddress.ip_address(host).version == 6
    except ValueError:
        is_host = False
    extra = parts.path or parts.query or parts.fragment or parts.username
    if not is_host or port is None or extra or parts.scheme != "http":
        raise ValueError(f"engine {address!r}: no address of an engine; write HOST:PORT")
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def read_wanted(run_dir: Path) -> tuple[list[str], list[str]]:
    """Return the addresses in the list, and a message for each line that is none."""
    try:
        lines = (run_dir / WANTED).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], []
    urls, errors = dict[str, None](), []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                urls[engine_url(text)] = None
            except ValueError as error:
                errors.append(f"{WANTED}:{number}: {error}")
    return list(urls), errors


def add_wanted(run_dir: Path, urls: Sequence[str]) -> None:
    """Put addresses into the list; those that are there stay."""

    def add(text: str) -> str:
        known = set(read_wanted(run_dir)[0])
        text = text if not text or text.endswith("\n") else text + "\n"
        return (text or _HEAD) + "".join(f"{url}\n" for url in urls if url not in known)

    _change(run_dir, add)


def remove_wanted(run_dir: Path, urls: Sequence[str]) -> list[str]:
    """Take addresses out of the list. Returns those that were not there."""
    missing = [url for url in urls if url not in read_wanted(run_dir)[0]]

    def is_kept(line: str) -> bool:
        try:
            return engine_url(line.partition("#")[0]) not in urls
        except ValueError:  # a comment, or a line with a mistake
            return True

    _change(run_dir, lambda text: "".join(line for line in text.splitlines(keepends=True) if is_kept(line)))
    return missing


def write_states(run_dir: Path, states: Sequence[EngineState]) -> None:
    write_atomically(run_dir / STATES, json.dumps(states, indent=1) + "\n")


def read_states(run_dir: Path) -> list[EngineState]:
    """Return what the run wrote last; nothing where it has never had such an engine."""
    path = run_dir / STATES
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _change(run_dir: Path, change: Callable[[str], str]) -> None:
    path = run_dir / WANTED
    with (run_dir / ".engines.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two that change the list at a time, none is lost
        mode = path.stat().st_mode if path.exists() else None
        before = path.read_text(encoding="utf-8") if mode is not None else ""
        write_atomically(path, change(before))
        if mode is not None:
            path.chmod(stat.S_IMODE(mode))  # a group that could write it still can
