"""Stacks as `faulthandler` writes them, read: where a process is, and whether it waits there for other ranks. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_HEAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_PACKAGE = Path(__file__).parents[2]
_LIBRARY = re.compile(r"/(site-packages|dist-packages|lib/python3[.\d]*)/|^<")
# Of a file, in which a rank waits for others: the name of what it waits in. None: the function's own.
_COLLECTIVES: tuple[tuple[str, str | None], ...] = (
    ("torch/distributed/distributed_c10d.py", None),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "send or receive between stages"),
    ("megatron/core/distributed/param_and_grad_buffer.py", "reduction of gradients"),
    ("megatron/core/tensor_parallel/mappings.py", "tensor-parallel collective"),
)


@lru_cache(maxsize=4096)
def _file_of_package(path: str) -> str | None:
    """Return the part of `path` behind `fusionrl/` if this package has such a file, else None.

    A checkout, or a folder of a user's, may be called fusionrl, too; another node may have the package elsewhere.
    """
    _, is_below, file = f"/{path}".rpartition("/fusionrl/")
    return file if is_below and (_PACKAGE / file).is_file() else None


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Return whether it is Python's own or an installed package's, which is not fusionrl."""
        return not self.is_fusionrl and bool(_LIBRARY.search(self.file))

    @property
    def is_fusionrl(self) -> bool:
        """Return whether the file is one of this package, here or on another node."""
        return _file_of_package(self.file) is not None

    def __str__(self) -> str:
        """Return file, line and function; the file as it is called within fusionrl, or with its folder."""
        file = _file_of_package(self.file) or "/".join(self.file.split("/")[-2:])
        return f"{self.function} ({file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """A thread: its frames, the innermost first."""

    frames: tuple[Frame, ...]

    @property
    def place(self) -> Frame | None:
        """The innermost line of fusionrl or of a user; else the innermost one."""
        return next((frame for frame in self.frames if not frame.is_library), self.frames[0] if self.frames else None)

    @property
    def collective(self) -> str | None:
        """The name of what it waits in for other ranks; None where it does not."""
        for frame in self.frames:
            if not frame.is_library:  # what is outside of it called something that has returned
                return None
            for file, name in _COLLECTIVES:
                if frame.file.endswith(file):
                    # The function that was called from without: "all_reduce", and not what it calls.
                    return name or [inner.function for inner in self.frames if inner.file.endswith(file)][-1]
        return None


def read_stacks(text: str) -> list[Thread]:
    """Return the threads in what a process wrote, less the one that answered; other output is left out."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    answering = "base/stack_signal.py"
    return [Thread(tuple(frames)) for frames in threads if answering not in (_file_of_package(f.file) for f in frames)]
