"""Logging of a run's processes: short lines that name the process's role, and libraries kept to what matters.

The file gets all our messages at the chosen level, and the libraries' warnings. The terminal gets the same without
the libraries' warnings, of which it shows only errors.
"""

import io
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LIBRARIES = (
    *("ray", "httpx", "httpcore", "urllib3", "asyncio", "aiohttp", "uvicorn", "filelock", "fsspec", "numexpr"),
    *("megatron", "transformers", "datasets", "huggingface_hub", "sglang", "sglang_router", "torch", "torchao"),
    *("matplotlib", "PIL", "py.warnings"),
)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_handlers: list[logging.Handler] = []  # those of the last `setup_logging`


def setup_logging(
    level: str, file: Path | None, role: str = "driver", console: Callable[[str], None] | None = None
) -> None:
    """Set up the root logger of this process; calling it again replaces what it set up before.

    `level` holds for the program and its plugins; `file` is appended to and its folder made; `role` names the
    process ("driver", "trainer 3", "engine 0"). Terminal lines go through `console`, for instance `Progress.print`, so
    that they do not tear the panel. Without a file records go to stderr. Libraries that configure logging when they are
    imported are silenced again by `quiet_libraries`.
    """
    root = logging.getLogger()
    while _handlers:
        handler = _handlers.pop()
        root.removeHandler(handler)
        handler.close()
    if console is not None:
        _handlers.append(_ConsoleHandler(console))
        _handlers[0].addFilter(_worth_the_terminal)
    elif file is None:
        _handlers.append(logging.StreamHandler(sys.stderr))
    for handler in _handlers:
        handler.setFormatter(_TerminalFormatter(role))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        to_file = _LogFile(file, mode="a", encoding="utf-8", delay=True)
        escaped_role = role.replace("%", "%%")  # a user's text
        to_file.setFormatter(logging.Formatter(f"%(asctime)s {escaped_role} %(levelname)s %(name)s: %(message)s"))
        _handlers.append(to_file)
    for handler in _handlers:
        root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    quiet_libraries()


def write_whole_lines() -> None:
    """Write what `print` is given line by line from now on, each line at once.

    Into a file, Python would keep some KiB back, and lose them where the process is killed. With PYTHONUNBUFFERED, or
    by Ray's own stream, other processes could write between a text and its end of line.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
        else:
            with suppress(AttributeError, OSError, ValueError):  # a stream that writes to no file
                lines = open(stream.fileno(), "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
                setattr(sys, name, lines)


def quiet_libraries() -> None:
    """Set the libraries to WARNING and let the root's handlers alone write their records.

    Some (ray, transformers) attach handlers of their own when they are imported; call this again after such imports.
    """
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.propagate = True
        logger.handlers[:] = [handler for handler in logger.handlers if isinstance(handler, logging.NullHandler)]


def _worth_the_terminal(record: logging.LogRecord) -> bool:
    # "py.warnings" is itself a dotted name; the others are the first part of theirs.
    library = record.name in LIBRARIES or record.name.partition(".")[0] in LIBRARIES
    return record.levelno >= logging.ERROR or not library


class _TerminalFormatter(logging.Formatter):
    """ "12:03:44 driver  text"; the level only where it is a warning or worse."""

    def __init__(self, role: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._role = role

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        return f"{self.formatTime(record, self.datefmt)} {self._role}  {level}{record.message}"


class _LogFile(logging.FileHandler):
    """Leaves out what a full disk has no room for, without a traceback for each record."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # of the records that found no room
            super().close()


class _ConsoleHandler(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._show(self.format(record))
        except Exception:  # as of every handler: a record that cannot be shown ends nothing
            self.handleError(record)
