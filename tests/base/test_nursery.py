"""A nursery's forks are the processes that were asked for, and it gives no others."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from fusionrl.base.nursery import Branch, Order, Request
from fusionrl.base.nursery_client import LENGTH, PID_FILE, _connect, ask
from fusionrl.base.process import ROOM
from tests.clock import here_s
from tests.own_process import lives, wait_until

KEY = "k" * 64
# What the nursery imports; `tell` is what its forks do.
MODULE = """
import json, os, random, signal, sys, tempfile
import numpy
from fusionrl.base.process import replace_title, set_title

IMPORTED_BY = os.getpid()
TEMPORARY = tempfile.gettempdir()
MODE = os.environ.get("HF_HUB_OFFLINE")
os.environ["HF_SET_BY_THE_IMPORT"] = "1"

def replaced():
    replace_title("its::own")
    return open("/proc/self/cmdline").read()

def tell(arguments):
    set_title("a.fork " + arguments[0])
    found = {
        "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "pid": os.getpid(),
        "umask": os.umask(0), "imported_by": IMPORTED_BY, "mode": MODE, "random": random.random(),
        "temporary": tempfile.gettempdir(),
        "late": sys.modules["late"].LATE, "numpy": numpy.random.random(),
        "oom_score_adj": int(open("/proc/self/oom_score_adj").read()),
        "input": sys.stdin.read(), "command": open("/proc/self/cmdline").read(), "session": os.getsid(0),
        "files": sorted(map(int, os.listdir("/proc/self/fd"))),
        "signals": [signal.getsignal(one) == signal.SIG_DFL for one in (signal.SIGTERM, signal.SIGCHLD)],
        "replaced": replaced(),
    }
    print(json.dumps(found), flush=True)
    print("a word", file=sys.stderr)
    if arguments[0] == "fails":
        raise ValueError("failed")
"""
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


@dataclass
class Nursery:
    """A nursery with branches "plain" and "threaded", and the environment that it was started with."""

    process: subprocess.Popen[bytes]
    folder: Path
    environment: dict[str, str]

    def ask(self, name: str, *, branch: str = "plain", key: str = KEY, **more: str) -> tuple[int, Path]:
        """The pid of a fork, and the file that it writes to."""
        out, given = self.folder / f"out-{len(list(self.folder.iterdir()))}", self.folder / "given"
        given.write_text("its input")
        program = more.pop("program", sys.executable)
        with given.open("rb") as source, out.open("wb") as target:
            files = [source.fileno(), target.fileno(), target.fileno()]
            environment = {**self.environment, "LATE_NUMBER": "7", **more}
            return ask(str(self.folder / branch), key, [name], environment, files, program), out


def _start(folder: Path, line: bytes, **more: str) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """A nursery that finds modules in a folder and has read a line, and its environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]), **more}
    command, pipe = [sys.executable, "-m", "fusionrl.base.nursery", " " * ROOM], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stderr=pipe, env=environment)
    process.stdin.write(line)
    process.stdin.flush()
    return process, environment


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("nursery")
    (folder / "imported_once.py").write_text(MODULE)
    (folder / "late.py").write_text("import os\nLATE = os.environ.get('LATE_NUMBER')\nfrom imported_once import *\n")
    (folder / "with_thread.py").write_text(THREADED)
    plain = Branch(str(folder / "plain"), ["imported_once"], "late:tell", {"OF_THE_BRANCH": "1"})
    plain = replace(plain, kept=["HF_"], free=["HF_FREE"], late=["LATE_"])
    branches = [Branch(str(folder / "threaded"), ["with_thread"], "imported_once:tell"), plain]
    process, environment = _start(folder, Order(KEY, branches).to_line(), HF_HUB_OFFLINE="1")
    with process:
        wait_until((folder / "plain").exists)
        yield Nursery(process, folder, environment)
        process.kill()


def _told(out: Path) -> dict:
    wait_until(lambda: "a word" in out.read_text())
    return json.loads(out.read_text().splitlines()[0])


def test_a_fork_is_what_was_asked_for(nursery: Nursery) -> None:
    temporary = nursery.folder / "temporary"
    temporary.mkdir()
    first, second = (nursery.ask(name, ONLY_OF=name, TMPDIR=str(temporary)) for name in ("first", "second"))
    told = [_told(out) for _, out in (first, second)]
    for (pid, _), name, one in zip((first, second), ("first", "second"), told, strict=True):
        assert one["pid"] == one["session"] == pid != one["imported_by"]
        added = {"ONLY_OF": name, "LATE_NUMBER": "7", "TMPDIR": str(temporary), "HF_SET_BY_THE_IMPORT": "1"}
        expected = {"arguments": [name], "input": "its input", "environment": nursery.environment | added}
        expected |= {"folder": os.getcwd(), "temporary": str(temporary), "mode": "1", "late": "7"}
        expected |= {"files": [0, 1, 2, 3], "signals": [True, True]}  # the last file is the listing itself
        assert {key: one[key] for key in expected} == expected
        assert one["command"].replace("\0", " ").startswith(f"{sys.executable} -m a.fork {name} ")
        assert one["replaced"].rstrip(" \0") == "its::own"
    assert told[0]["imported_by"] == told[1]["imported_by"] == nursery.process.pid
    assert told[0]["random"] != told[1]["random"] and told[0]["numpy"] != told[1]["numpy"]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid, _ in (first, second)))  # they are collected


def test_a_fork_ends_as_a_program_does_and_what_is_no_request_is_left(nursery: Nursery) -> None:
    _, out = nursery.ask("fails")
    wait_until(lambda: "ValueError: failed" in out.read_text())
    for data in (b"", b"\0\0", b"\0\0\0\4nope"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(nursery.folder / "plain"))
            connection.sendall(data)
    assert _told(nursery.ask("after it")[1])["arguments"] == ["after it"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"key": "k" * 63 + "x"}, "it has ended|refused"),
        ({"HF_HUB_OFFLINE": "0", "HF_ONLY_HERE": "1"}, "another value of HF_HUB_OFFLINE, HF_ONLY_HERE$"),
        ({"LATE_NUMBER": "8"}, "another value of LATE_NUMBER$"),
        ({"branch": "threaded"}, "refused|gives no"),
        ({"program": "/usr/bin/another-python"}, "it is of "),
    ],
)
def test_it_gives_no_other_process(nursery: Nursery, more: dict[str, str], why: str) -> None:
    with pytest.raises(OSError, match=why):
        nursery.ask("never", **more)
    assert _told(nursery.ask("then", HF_FREE="read later")[1])["environment"]["HF_FREE"] == "read later"


def test_a_fork_is_ended_for_its_memory_before_others_as_its_asker_is(nursery: Nursery) -> None:
    """A raylet sets this for the process that it has started."""
    code = (
        "import os, sys\n"
        "from fusionrl.base.nursery_client import ask\n"
        "open('/proc/self/oom_score_adj', 'w').write('900')\n"
        "ask(sys.argv[1], sys.argv[2], ['it'], os.environ, (0, 1, 2))\n"
    )
    out, command = nursery.folder / "out-oom", [sys.executable, "-c", code, str(nursery.folder / "plain"), KEY]
    env = {**nursery.environment, "LATE_NUMBER": "7"}
    with out.open("wb") as target:
        subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=target, stderr=target, check=True)
    assert _told(out)["oom_score_adj"] == 900


def _send(nursery: Nursery, out: Path) -> socket.socket:
    """A request whose answer nobody has read yet."""
    request = Request(KEY, ["never"], nursery.environment | {"LATE_NUMBER": "7"}, os.getcwd(), 0o22, sys.executable, 0)
    data = json.dumps(asdict(request)).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(nursery.folder / "plain"))
    with out.open("wb") as target, open(os.devnull, "rb") as nothing:
        files = [nothing.fileno(), target.fileno(), target.fileno()]
        socket.send_fds(connection, [LENGTH.pack(len(data))], files)
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("has_answer", [False, True])
def test_whoever_has_given_up_gets_nothing(nursery: Nursery, tmp_path: Path, has_answer: bool) -> None:
    """Neither before the fork nor after it; and the others get theirs."""
    assert _told(nursery.ask("first")[1])["arguments"] == ["first"]
    os.kill(nursery.process.pid, signal.SIGSTOP)
    try:
        connection = _send(nursery, tmp_path / "out")
        if not has_answer:
            connection.close()
    finally:
        os.kill(nursery.process.pid, signal.SIGCONT)
    if has_answer:
        pid = LENGTH.unpack(connection.recv(LENGTH.size))[0]
        assert lives(pid)
        connection.close()
        wait_until(lambda: not lives(pid))
    assert _told(nursery.ask("then")[1])["arguments"] == ["then"]
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize("has_order", [True, False])
def test_modules_are_imported_before_the_order_comes(tmp_path: Path, has_order: bool) -> None:
    """They must start no threads: a fork has one, so a branch would see none of them."""
    (tmp_path / "early.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n" + THREADED * has_order)
    process, _ = _start(tmp_path, b'["early"]\n')
    with process:
        wait_until((tmp_path / "imported").exists)
        assert process.poll() is None
        if has_order:
            process.stdin.write(Order(KEY, [Branch(str(tmp_path / "one"), [], "json:dumps")]).to_line())
        process.stdin.close()
        said = process.stderr.read()
    assert process.returncode == int(has_order) and (b"early starts threads: nothing is forked" in said) == has_order
    assert has_order or said == b"", "a run that ends before its flags are read"


def test_who_asks_waits_while_it_imports_and_not_for_one_that_died(tmp_path: Path) -> None:
    """Before the order comes it has no sockets: a slow disk must not send every process the usual way."""
    (tmp_path / "told.py").write_text("def tell(arguments): print(arguments[0], flush=True)\n")
    (tmp_path / "early.py").write_text("import time\ntime.sleep(1.0)\n")
    one, out = tmp_path / "one", tmp_path / "out"
    process, environment = _start(tmp_path, b'["early"]\n' + Order(KEY, [Branch(str(one), [], "told:tell")]).to_line())
    with process, out.open("wb") as target:
        request = (str(one), KEY, ["it"], environment, [target.fileno()] * 3)
        (tmp_path / PID_FILE).write_text(str(process.pid))
        assert not one.exists()
        ask(*request)
        wait_until(lambda: out.read_text() == "it\n")
        assert not (tmp_path / PID_FILE).exists()
        process.kill()
        process.wait()
        one.unlink()
        (tmp_path / PID_FILE).write_text(str(process.pid))
        begun = time.monotonic()
        with pytest.raises(FileNotFoundError):
            ask(*request)
        assert time.monotonic() - begun < here_s(5)


def test_who_asks_waits_between_a_path_and_its_listening(tmp_path: Path) -> None:
    """A socket is bound before it listens: one who connects then is refused, though the nursery lives."""
    was_refused = threading.Event()

    class Asking(socket.socket):
        def connect(self, address: object) -> None:
            try:
                super().connect(address)  # type: ignore[arg-type]
            except ConnectionRefusedError:
                was_refused.set()
                raise

    (tmp_path / PID_FILE).write_text(str(os.getpid()))
    with socket.socket(socket.AF_UNIX) as server, Asking(socket.AF_UNIX) as connection:
        server.bind(str(tmp_path / "one"))
        threading.Thread(target=lambda: was_refused.wait(20.0) and server.listen()).start()
        _connect(connection, str(tmp_path / "one"))
        assert was_refused.is_set() and connection.getpeername() == str(tmp_path / "one")


@pytest.mark.parametrize("is_killed", [False, True])
def test_it_ends_with_whoever_started_it(tmp_path: Path, is_killed: bool) -> None:
    """All branches, when its standard input is closed and when its parent is killed."""
    line = Order(KEY, [Branch(str(tmp_path / name), [], "json:dumps") for name in ("one", "two")]).to_line()
    starter = (
        "import subprocess, sys, time\n"
        f"process = subprocess.Popen([sys.executable, '-m', 'fusionrl.base.nursery', ' '], stdin=subprocess.PIPE)\n"
        f"process.stdin.write({line!r})\n"
        "process.stdin.flush()\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "process.stdin.close()\n"
        "time.sleep(600)\n"
    )
    command, pipe = [sys.executable, "-c", starter], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as parent:
        pid = int(parent.stdout.readline())
        wait_until((tmp_path / "two").exists)
        children = Path(f"/proc/{pid}/task/{pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 1)
        branch = children.read_text().strip()
        if is_killed:
            parent.kill()
        else:
            parent.stdin.write("close\n")
        wait_until(lambda: not lives(pid) and not lives(branch))
        parent.kill()
