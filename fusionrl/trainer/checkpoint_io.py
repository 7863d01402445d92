"""Writes Megatron's checkpoint files with threads of this process.

Megatron writes in forked processes and hands their results through a third, spawned one: made for saving
while training goes on. Saving here waits for the files anyway. Then a fork of a process with many threads
(Ray's, gloo's) is a risk without a gain, the spawned process runs the user's main module again, and both cost
seconds a save.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

_Writer = filesystem_async.FileSystemWriterAsync


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
    # The signature and the form of `results` are those of the method this stands in for: a dictionary of
    # what each file's writer reports, or the first exception.
    def write_one(index: int) -> Any:
        outcome: queue.Queue[tuple[int, Any]] = queue.Queue()
        running: queue.Queue[int] = queue.Queue()
        running.put(index)
        _Writer.write_preloaded_data(transforms, index, buckets[index], outcome, running, True)
        return outcome.get()[1]

    with ThreadPoolExecutor(max_workers=max(len(buckets), 1)) as pool:
        reports = list(pool.map(write_one, range(len(buckets))))
    failed = next((report for report in reports if isinstance(report, Exception)), None)
    results.put(failed if failed is not None else dict(enumerate(reports)))


@contextmanager
def in_process_writer() -> Iterator[None]:
    """Within it `dist_checkpointing.save` writes as described above."""
    writer, results = _Writer.write_preloaded_data_multiproc, filesystem_async._results_queue
    _Writer.write_preloaded_data_multiproc = staticmethod(_write)
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        _Writer.write_preloaded_data_multiproc = staticmethod(writer)
        filesystem_async._results_queue = results
