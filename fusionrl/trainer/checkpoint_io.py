"""Writes Megatron's checkpoint files: with threads of this process, or in a separate writer process.

Megatron's own ways fork this process and spawn another that runs the user's main module again. A fork of a process
with many threads (Ray's, gloo's) is a risk; so files are written here, by the functions that Megatron's processes
would run.

The writer process is started with the trainer, before there is anything to write. It is handed a copy of the state in
memory that both see (a memfd), so that training continues once the copy is made.
"""

from __future__ import annotations

import math
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from fusionrl.base import cpu_wing
from fusionrl.base.environment import child_environment
from fusionrl.base.files import Facts, Written, facts_of
from fusionrl.base.process import answer_with_stacks
from fusionrl.base.sockets import frame, receive
from fusionrl.trainer.process_groups import gathered

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    Bytes: TypeAlias = "list[tuple[WriteItem, object]]"
    # Megatron's: the file, its key, and what it gets.
    Bucket: TypeAlias = "tuple[str | Path, str, tuple[Bytes, list[tuple[WriteItem, torch.Tensor]]]]"
    SharedBucket: TypeAlias = "tuple[str | Path, str, tuple[Bytes, list[tuple[WriteItem, _Stored]]]]"
    _Request: TypeAlias = "tuple[int, int, list[object], list[SharedBucket]]"  # what `_write_shared` takes
    Report: TypeAlias = "list[WriteResult] | Exception"  # of one bucket

_ALIGNMENT = 64
_STOP_TIMEOUT_S = 5.0


# ------------------------------------------------------------------------------------------------ one rank's files
@dataclass(frozen=True)
class _Stored:
    """The place of a tensor in the memory that both processes see."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_buckets(transforms: list[object], buckets: list[Bucket]) -> Written[Report]:
    """Write each bucket's file and hash it, one thread each. Raises OSError if a file cannot be written."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def write_one(index: int) -> tuple[Report, Facts]:
        outcome: queue.Queue[tuple[int, Report]] = queue.Queue()
        running: queue.Queue[int] = queue.Queue()
        running.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, buckets[index], outcome, running, True)
        report = outcome.get()[1]
        path = Path(buckets[index][0])
        if isinstance(report, Exception):
            _empty_frames(report)
            report = _system_error(report, path)
        return report, {} if isinstance(report, Exception) else facts_of(path.parent, [path.name])

    if not buckets:
        return Written()
    with ThreadPoolExecutor(max_workers=len(buckets)) as pool:
        done = list(pool.map(write_one, range(len(buckets))))
    for report, _ in done:
        if isinstance(report, OSError):
            raise report
        if isinstance(report, Exception):
            raise OSError(f"{type(report).__name__}: {report}") from report
    files = {name: fact for _, facts in done for name, fact in facts.items()}
    return Written({index: report for index, (report, _) in enumerate(done)}, files)


def _system_error(error: Exception, file: Path) -> Exception:
    """Return the error with which the system refuses to write on in `file`; `error` itself where it does not.

    Of a full disk torch's writer says "unexpected pos 704 vs 598".
    """
    try:
        with file.open("ab", buffering=0) as rest:
            for _ in range(2):  # a write may be cut short first
                rest.write(bytes(1 << 20))
    except OSError as refusal:
        return refusal
    return error


def _empty_frames(error: BaseException) -> None:
    """Clear the locals in an error's traceback: they hold what was written, and the error itself, in a loop.

    Python 3.12.0 and 3.12.1 crash when the garbage collector finds a view of a BytesIO in a loop, and a rank whose
    disk is full died of it (python/cpython#111049).
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__


def _share(buckets: list[Bucket]) -> tuple[int, int, list[SharedBucket]]:
    """(memfd, its size, the buckets with `_Stored` for tensors): a copy that later training does not touch."""
    stored: dict[int, tuple[torch.Tensor, _Stored]] = {}
    size = 0
    for _, _, (_, tensors) in buckets:
        for _, tensor in tensors:
            stored[id(tensor)] = (tensor, _Stored(size, tensor.dtype, tuple(tensor.shape)))
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    descriptor = os.memfd_create("fusionrl-checkpoint")
    try:
        os.posix_fallocate(descriptor, 0, max(size, 1))
        with mmap.mmap(descriptor, max(size, 1)) as memory:
            for tensor, place in stored.values():
                _view(memory, place).copy_(tensor)
    except BaseException:
        os.close(descriptor)
        raise
    shared = [
        (path, key, (data, [(item, stored[id(tensor)][1]) for item, tensor in tensors]))
        for path, key, (data, tensors) in buckets
    ]
    return descriptor, size, shared


def _view(memory: mmap.mmap, place: _Stored) -> torch.Tensor:
    count = math.prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


# ------------------------------------------------------------------------------------------------ the writer process
class WriterProcess:
    """A process that writes what `submit` hands it, one save at a time, and ends with this one.

    At both ends a thread reads at all times, so that neither waits for the other: a message of a large model is more
    than a socket takes.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fusionrl.trainer.checkpoint_io", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment("checkpoint-writer"),
            )
        self._awaited: queue.SimpleQueue[Future[Written[Report]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._take_answers, daemon=True).start()

    def submit(self, transforms: list[object], buckets: list[Bucket]) -> Future[Written[Report]]:
        """Copy the buckets' memory and let them be written; returns when the copy is made.

        Raises OSError, now or by the result, if the process is gone or a file could not be written.
        """
        descriptor, size, shared = _share(buckets)
        try:
            socket.send_fds(self._socket, [b"m"], [descriptor])
            self._socket.sendall(frame((size, transforms, shared)))
        except OSError as error:
            raise OSError(f"the process that writes checkpoints is gone ({self._end()})") from error
        finally:
            os.close(descriptor)
        answer: Future[Written[Report]] = Future()
        self._awaited.put(answer)
        return answer

    def _take_answers(self) -> None:
        for awaited in iter(self._awaited.get, None):
            try:
                outcome = receive(self._socket)
            except (OSError, EOFError):
                outcome = OSError(f"the process that writes checkpoints is gone ({self._end()})")
            if isinstance(outcome, Exception):
                awaited.set_exception(outcome)
            else:
                awaited.set_result(outcome)

    def _end(self) -> str:
        try:
            return f"exit code {self._process.wait(_STOP_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            return "it does not answer"

    def close(self) -> None:
        """End the process; what is being written is not waited for."""
        self._process.kill()
        self._process.wait()
        self._awaited.put(None)
        self._socket.close()


def _serve(connection: socket.socket) -> None:
    """The writer process: until the trainer's end of the connection is closed."""
    cpu_wing.prepare_megatron()
    import megatron.core.dist_checkpointing  # noqa: F401 (takes seconds; now, and not at the first save)

    requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    with suppress(ConnectionError):  # the trainer is gone
        while True:
            connection.sendall(frame(_write_shared(*requests.get())))


def _read_requests(connection: socket.socket, requests: queue.SimpleQueue[_Request]) -> None:
    """Queue the trainer's requests; without the trainer end at once, as another may save into the same folder."""
    try:
        with suppress(ConnectionError, EOFError):
            while (message := socket.recv_fds(connection, 1, 1))[0]:
                requests.put((message[1][0], *receive(connection)))
    except Exception:  # the process ends with it, whatever it is
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _write_shared(
    descriptor: int, size: int, transforms: list[object], shared: list[SharedBucket]
) -> Written[Report] | OSError:
    try:
        memory = mmap.mmap(descriptor, max(size, 1))
    finally:
        os.close(descriptor)
    buckets = [
        (path, key, (data, [(item, _view(memory, place)) for item, place in tensors]))
        for path, key, (data, tensors) in shared
    ]
    try:
        return write_buckets(transforms, buckets)
    except OSError as error:
        return OSError(*error.args)  # without its traceback, which would keep the memory


# ------------------------------------------------------------------------------------------------ all ranks
class PendingFiles:
    """A Megatron save whose files are being written, or are: `finish` completes it; collective.

    Megatron's finalisation reads from `results` what was written. Without a `writer` this process writes, at once.
    """

    def __init__(
        self, request: AsyncRequest, results: queue.Queue[dict[int, Report]], writer: WriterProcess | None
    ) -> None:
        self._request, self._results = request, results
        self._answer: Future[Written[Report]] | None = None
        self._written: Written[Report] = Written()
        self.files: Facts = {}
        """Sizes and hashes of all ranks' files, once `finish` has returned."""
        self._error: OSError | None = None
        if request.async_fn is None:  # nothing to write on this rank
            return
        transforms = request.async_fn.args[0]
        try:
            if writer is None:
                self._written = write_buckets(transforms, request.preload_fn())
            else:
                self._answer = writer.submit(transforms, request.async_fn_args[1])
        except OSError as error:  # said by `finish`, on all ranks: the others would wait for this one
            self._error = error

    def is_done(self) -> bool:
        """Return whether `finish` would not wait for this rank."""
        return self._answer is None or self._answer.done()

    def finish(self) -> None:
        """Wait for all ranks' files and write what describes them. Raises OSError on every rank if one cannot write."""
        with failing_together():
            if self._error is not None:
                raise self._error
            if self._answer is not None:
                self._written = self._answer.result()
        if self._request.async_fn is not None:
            self._results.put(self._written.reports)
        for files in gathered(self._written.files):
            self.files |= files
        for finalize in self._request.finalize_fns:
            finalize()


@contextmanager
def failing_together(
    kind: type[Exception] = OSError, message: str = "trainer rank {rank} could not write its files ({error})"
) -> Iterator[None]:
    """Raise an error of this kind that occurs within it on one rank on every rank, at its end; collective.

    The code within it is not. Without it the others would wait for the rank that failed, in whatever is collective
    next.
    """
    problem: str | None = None
    try:
        yield
    except kind as error:
        problem = str(error)
    for rank, error_there in enumerate(gathered(problem)):
        if error_there is not None:
            raise kind(message.format(rank=rank, error=error_there))


@contextmanager
def result_queue() -> Iterator[queue.Queue[dict[int, Report]]]:
    """The queue that a save planned within it takes its results from; Megatron's own is another process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue[dict[int, Report]] = queue.Queue()
    before = filesystem_async._results_queue
    filesystem_async._results_queue = results
    try:
        yield results
    finally:
        filesystem_async._results_queue = before


if __name__ == "__main__":
    answer_with_stacks()
    with socket.socket(fileno=int(sys.argv[1])) as _connection:
        _serve(_connection)
