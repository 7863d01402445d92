"""A process that has imported large libraries, and forks others from itself: `python -m fusionrl.base.nursery ROOM`.

It reads lists of modules and then an `Order` from its standard input, each a line of JSON, and forks a branch for each
kind of process. A branch imports its modules and listens at a socket. A process that knows the key
(`nursery_client.ask`) gets a fork of a branch, which calls the branch's function. So a library is imported once a run.

* A fork has one thread. A branch that has threads after its imports ends; its processes start in the usual way.
* A fork has the environment, folder, umask and files of its requester. If a library has kept another value of a
  variable from its import, the branch gives no process.
* The nursery ends with its starter: when its standard input is closed, and when its parent dies. Its forks do not.

Uses the standard library alone, apart from the modules of its order.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hmac
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NoReturn

from fusionrl.base.nursery_client import LENGTH, MAX_DESCRIPTORS, PID_FILE, TAKEN
from fusionrl.base.process import raise_open_files
from fusionrl.base.sockets import receive_exactly

_PR_SET_PDEATHSIG = 1
_TAKEN_S = 10.0


@dataclass(frozen=True)
class Branch:
    """A kind of process. Of variables `kept`, `late` have the beginnings of names, `free` names."""

    path: str  # of its socket
    modules: list[str]  # that it imports
    function: str  # "module:name", called with the list of arguments in each fork; imported at the first request
    environment: dict[str, str] = field(default_factory=dict)  # added to the nursery's before the imports
    kept: list[str] = field(default_factory=list)  # variables whose values the libraries keep from their import
    late: list[str] = field(default_factory=list)  # those that the first request brings
    free: list[str] = field(default_factory=list)  # those of `kept` that are read only when a process works


@dataclass(frozen=True)
class Order:
    """The input of a nursery."""

    key: str
    branches: list[Branch]

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        fields = json.loads(line)
        return cls(fields["key"], [Branch(**branch) for branch in fields["branches"]])


def main() -> None:
    """Read the modules and the orders from standard input, import, and fork on request."""
    _end_with_parent()
    raise_open_files()  # as those do from which its forks would otherwise be started
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    modules: list[str] = []
    while (line := sys.stdin.buffer.readline()).startswith(b"["):
        modules += json.loads(line)
        _import(modules)
    if not line:
        return  # the starter has ended, or needs nothing more
    order = Order.from_line(line)
    listeners = [_listen(branch.path) for branch in order.branches]
    with contextlib.suppress(OSError):  # started by hand
        os.unlink(os.path.join(os.path.dirname(order.branches[0].path), PID_FILE))  # who asks waits no longer
    _end_with_threads(modules)
    *earlier, last = zip(order.branches, listeners, strict=True)
    for branch, listener in earlier:
        parent = os.getpid()
        if os.fork() == 0:
            _end_with_parent(parent)
            serve(ImportedBranch(branch), listener, order.key)
        listener.close()
    branch, listener = last
    serve(ImportedBranch(branch), listener, order.key)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    return listener


def _import(modules: Sequence[str]) -> None:
    """Import them; the collector of garbage never looks at what they leave, in no fork."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _end_with_parent(parent: int | None = None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(0)  # it died before


class ImportedBranch:
    """A branch after its imports, and the environment in which it made them."""

    def __init__(self, branch: Branch) -> None:
        os.environ.update(branch.environment)
        self._branch = branch
        self.function: Callable[[list[str]], object] = _not_yet
        self._before = dict(os.environ)
        _import(branch.modules)

    def import_late(self, request: Request) -> None:
        """Import the function of the forks, at the first request; ends this process if it must not be forked."""
        if self.function is not _not_yet:
            return
        names = [name for name in request.environment if name.startswith(tuple(self._branch.late))]
        late = {name: request.environment[name] for name in names}
        os.environ.update(late)
        self._before.update(late)
        module, _, name = self._branch.function.partition(":")
        _import([module])
        _end_with_threads([*self._branch.modules, module])
        self.function = getattr(sys.modules[module], name)

    def refusal(self, request: Request) -> str | None:
        """Why what was imported is not what the process would import; None: it is."""
        if request.program != sys.executable:
            return f"it is of {sys.executable}"
        fixed = (*self._branch.kept, *self._branch.late)
        names = {name for name in (*request.environment, *self._before) if name.startswith(fixed)}
        names -= set(self._branch.free)
        changed = [name for name in sorted(names) if request.environment.get(name) != self._before.get(name)]
        return f"its imports have read another value of {', '.join(changed)}" if changed else None

    def environment(self, request: Request) -> dict[str, str]:
        """Return a fork's environment: the requested one and the variables that imports added."""
        return {name: value for name, value in os.environ.items() if name not in self._before} | request.environment


def _not_yet(arguments: list[str]) -> None:
    raise AssertionError("a process is forked before its function is imported")


def serve(imported: ImportedBranch, listener: socket.socket, key: str) -> NoReturn:
    """Fork for each request that has the key, until standard input is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects what has ended
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    ready.register(sys.stdin, select.POLLIN)
    while True:
        readable = [descriptor for descriptor, _ in ready.poll()]
        if sys.stdin.fileno() in readable:
            os._exit(0)  # closed
        connection, _ = listener.accept()
        with connection:
            try:
                request, descriptors = _receive(connection, key)
            except (OSError, EOFError, ValueError, TypeError):
                continue
            imported.import_late(request)
            if reason := imported.refusal(request):
                _say(connection, LENGTH.pack(0) + reason.encode()[:1000])
            elif not _is_gone(connection):
                if pid := os.fork():
                    _say(connection, LENGTH.pack(pid))
                else:
                    listener.close()
                    _wait_until_taken(connection)
                    _live(imported, request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _is_gone(connection: socket.socket) -> bool:
    """Return whether the requester has given up: it started the process itself, or died."""
    peer = select.poll()
    peer.register(connection, select.POLLRDHUP)  # and the ends of a connection that are always told
    return bool(peer.poll(0))


def _say(connection: socket.socket, answer: bytes) -> None:
    try:
        connection.sendall(answer)
    except OSError:
        pass  # the requester is gone; a fork waits for its answer in vain, and ends


def _wait_until_taken(connection: socket.socket) -> None:
    """End this fork unless the requester has its pid: it may have started the process itself meanwhile."""
    try:
        connection.settimeout(_TAKEN_S)
        is_taken = connection.recv(1) == TAKEN
        connection.close()
    except OSError:
        is_taken = False
    if not is_taken:
        os._exit(0)


def _end_with_threads(modules: Sequence[str]) -> None:
    """End this process if it must not be forked, as these modules have started threads."""
    child = os.fork()  # OpenBLAS ends its threads at a fork, and starts them again when it needs them
    if child == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):  # the kernel has collected it
        os.waitpid(child, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        print(f"one of {', '.join(modules)} starts threads: nothing is forked", file=sys.stderr, flush=True)
        os._exit(1)


@dataclass(frozen=True)
class Request:
    """A requested process, see `nursery_client.ask`."""

    key: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    program: str
    oom_score_adj: int


def _receive(connection: socket.socket, key: str) -> tuple[Request, list[int]]:
    """A request and the open files that came with it. Raises OSError, EOFError, ValueError, TypeError if it did not
    come as a whole, or without the key."""
    connection.settimeout(10.0)
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, MAX_DESCRIPTORS)
    try:
        if len(head) < LENGTH.size:
            raise ValueError("closed")
        (left,) = LENGTH.unpack(head)
        message = json.loads(receive_exactly(connection, left))
        if not isinstance(message, dict) or not hmac.compare_digest(str(message.get("key")).encode(), key.encode()):
            raise ValueError("no key")
        return Request(**message), descriptors
    except (OSError, EOFError, ValueError, TypeError):  # the last: other fields
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _live(imported: ImportedBranch, request: Request, descriptors: list[int]) -> NoReturn:
    """Become the requested process."""
    environment = imported.environment(request)
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Those that came have numbers above all that are to be: none is closed before it is copied.
    high = [os.dup2(descriptor, 100 + index, inheritable=False) for index, descriptor in enumerate(descriptors)]
    os.closerange(0, 100)
    for index, descriptor in enumerate(high):
        os.dup2(descriptor, index)
        os.close(descriptor)
    os.umask(request.umask)
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(request.oom_score_adj))
    except OSError:
        pass  # less than this process's own, which only the system's administrator may give
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of TMPDIR as it was, if an import has asked for it
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python seeds its own anew in a fork
    finish(imported.function, request.arguments)


def finish(function: Callable[[list[str]], object], arguments: list[str]) -> NoReturn:
    """Call a function and end this fork as the interpreter ends a program."""
    code = 0
    try:
        function(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # as the interpreter does with uncaught exceptions
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter's end does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
