"""The engines of a run that others start: the list of those that are wanted, and what has become of each.

Both are files in the run's folder. `engines.txt` says which engines the run is to have, one address a line; whoever
starts engines (a person, a scheduler's script, `fusionrl engines`) writes it, and the run reads it about once a second.
`engines.json` is written by the run.
"""

import fcntl
import ipaddress
import json
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

from fusionrl.observe.json_values import write_atomically

WANTED, STATES = "engines.txt", "engines.json"
_HEAD = "# Addresses of engines that others have started, one a line. A line that goes lets its engine go.\n"
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class EngineState(TypedDict):
    """One engine: its state is "own", "joining", "ready", "serving", "leaving", "gone", "lost" or "refused"."""

    url: str
    state: str
    note: str


def engine_url(address: str) -> str:
    """Return `http://host:port` of an address, with or without the beginning.

    Raises:
        ValueError: it is not such an address.
    """
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
    states: list[EngineState] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return states


def _change(run_dir: Path, change: Callable[[str], str]) -> None:
    path = run_dir / WANTED
    with (run_dir / ".engines.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two that change the list at a time, none is lost
        mode = path.stat().st_mode if path.exists() else None
        before = path.read_text(encoding="utf-8") if mode is not None else ""
        write_atomically(path, change(before))
        if mode is not None:
            path.chmod(stat.S_IMODE(mode))  # a group that could write it still can
