"""The command line of a forked process, as `ps` shows it."""

import ctypes
from pathlib import Path

ROOM = 6000
"""Characters that a process leaves for titles at the end of its command line: `python -m MODULE ROOM_OF_SPACES`."""


def set_title(words: str) -> None:
    """Show `python -m WORDS` as this process's command line, cut to the room that is there.

    Only the arguments are written over, their number stays, and the environment behind them, by which a process of a
    run is known, stays too: packages that set titles write over all of it.
    """
    if (arguments := _arguments()) is None:
        return
    start, size, python = arguments
    head = python + b"\0-m\0"
    room = size - len(head) - 3
    title = words.encode()[:room]
    text = head + title + b" \0" + b" " * (room - len(title)) + b"\0"
    assert len(text) == size
    ctypes.memmove(start, text, len(text))


def replace_title(title: str) -> None:
    """Show `title` alone as the command line of a process that has called `set_title`, or is a fork of one.

    In the place of `setproctitle.setproctitle`, which does nothing there: it does not find its arguments.
    """
    if (arguments := _arguments()) is not None:
        start, size, _ = arguments
        ctypes.memmove(start, title.encode()[: size - 1].ljust(size - 1) + b"\0", size)


def _arguments() -> tuple[int, int, bytes] | None:
    """(address and bytes of the arguments, the first of them); None without room for a title."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49, counted from 1
        parts = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    except (OSError, IndexError, ValueError):
        return None  # this system has no such files: the process keeps its command line
    if len(parts) != 5 or parts[1] != b"-m" or len(parts[3]) < ROOM // 2:  # the last one is empty
        return None
    return start, end - start, parts[0]
