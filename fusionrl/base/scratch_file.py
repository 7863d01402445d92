"""A file without a name: bytes that a process puts aside, and that are gone when it ends."""

import bisect
import os
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple


class Extent(NamedTuple):
    """A part of the file."""

    start: int
    size: int


class ScratchFile:
    """Holds pieces of bytes; space of those that are given back is used again. For several threads.

    folder  on whose file system it is; None: that of temporary files
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (it lives as long as this object)
        self._free: list[Extent] = []  # ascending; no two touch
        self._lock = threading.Lock()
        self.num_bytes = 0  # of the file

    @property
    def address(self) -> str:
        """Path of the file for other processes of this user, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def write(self, content: bytes) -> Extent:
        """Put bytes aside.

        Raises:
            OSError: the disk is full.
        """
        with self._lock:
            extent = self._take(len(content))
        view, place = memoryview(content), extent.start
        while view:
            written = os.pwrite(self._file.fileno(), view, place)
            view, place = view[written:], place + written
        return extent

    def _take(self, size: int) -> Extent:
        for number, free in enumerate(self._free):
            if free.size >= size:
                rest = Extent(free.start + size, free.size - size)
                self._free[number : number + 1] = [rest] if rest.size else []
                return Extent(free.start, size)
        extent = Extent(self.num_bytes, size)
        self.num_bytes += size
        return extent

    def read(self, extent: Extent) -> bytes:
        """Return the bytes that `write` put there."""
        parts, place, left = [], extent.start, extent.size
        while left and (part := os.pread(self._file.fileno(), left, place)):
            parts.append(part)
            place, left = place + len(part), left - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def give_back(self, extent: Extent) -> None:
        """Let the space be used again."""
        with self._lock:
            number = bisect.bisect(self._free, extent)
            start, end = extent.start, extent.start + extent.size
            if number < len(self._free) and self._free[number].start == end:
                end += self._free.pop(number).size
            if number and sum(self._free[number - 1]) == start:
                number -= 1
                start = self._free.pop(number).start
            if end == self.num_bytes:
                self.num_bytes = start
                os.ftruncate(self._file.fileno(), start)
            else:
                self._free.insert(number, Extent(start, end - start))
