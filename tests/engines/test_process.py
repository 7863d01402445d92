"""ChildProcess, port reservation: the failures are made to happen."""

import functools
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusionrl.base.nursery import Branch, Order
from fusionrl.base.nursery_client import FOLDER_VARIABLE
from fusionrl.base.process import ROOM, signal_name
from fusionrl.engines import process_minder
from fusionrl.engines.process import (
    NURSERY_SOCKET,
    SERVER_MODULE,
    ChildExited,
    ChildProcess,
    ForkedMinder,
    PortReservation,
    fork_server,
    start_on_free_ports,
)
from fusionrl.engines.spec import EngineSpec, server_environment
from fusionrl.runtime.early_start import engine_branch
from fusionrl.sandbox.limits import MemoryCgroup, writable_parent
from tests.clock import here_s

# A child that starts a grandchild in a session of its own (which no signal to a process group reaches),
# writes both pids and sleeps.
FAMILY = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1] + ".tmp", "w").write(f"{os.getpid()} {grandchild.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""

STARTER = """
import os, subprocess, sys, time
from fusionrl.engines.process import ChildProcess
child = ChildProcess(sys.argv[2:], sys.argv[1])
subprocess.Popen(["sleep", "20"])                 # a later child by exec ...
if os.fork() == 0: time.sleep(20); os._exit(0)    # ... and one by fork must not keep the socket open
time.sleep(600)
"""


# In the place of SGLang's server in a nursery: it runs the Python program of its first argument.
SERVER = """
import sys, types

def main(arguments):
    sys.argv = ["-c", *arguments[1:]]
    exec(arguments[0], {"__name__": "__main__"})

sys.modules["fusionrl.engines.launch_server"] = types.ModuleType("fusionrl.engines.launch_server")
sys.modules["fusionrl.engines.launch_server"].main = main
"""
TOKEN = "t" * 64


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a nursery whose servers run any Python program."""
    folder = tmp_path_factory.mktemp("nursery")
    (folder / "any_program.py").write_text(SERVER)
    paths = [str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    branch = Branch(
        str(folder / NURSERY_SOCKET),
        ["any_program", "torch"],
        "fusionrl.engines.process:mind_server",
        kept=["HF_"],
    )
    with subprocess.Popen(
        [sys.executable, "-m", "fusionrl.base.nursery", " " * ROOM],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        assert process.stdin is not None
        process.stdin.write(Order(TOKEN, [branch]).to_line())
        process.stdin.flush()
        assert _wait((folder / NURSERY_SOCKET).exists)
        yield folder
        process.kill()


def _start(log: Path, *arguments: str, command: Sequence[str], **options: Any) -> ChildProcess:
    return ChildProcess([*command, *arguments], log, **options)


Start = functools.partial[ChildProcess]


@pytest.fixture(params=["started", "forked"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a Python program: as a command, and as a fork of a nursery."""
    if request.param == "started":
        return functools.partial(_start, command=[sys.executable, "-c"])
    monkeypatch.setenv(FOLDER_VARIABLE, str(request.getfixturevalue("nursery")))
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return functools.partial(_start, command=[sys.executable, "-m", SERVER_MODULE])


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait(predicate, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if predicate():
            return True
        time.sleep(0.02)
    return False


def _family_pids(path: Path) -> list[int]:
    assert _wait(path.exists)
    return [int(pid) for pid in path.read_text().split()]


def test_sigkill_of_the_starter_leaves_no_descendant(start: Start, tmp_path: Path) -> None:
    pids_file, log = tmp_path / "pids", tmp_path / "log"
    command = start.keywords["command"]
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(log), *command, FAMILY, str(pids_file)])
    pids = _family_pids(pids_file)
    assert all(_running(pid) for pid in pids)
    starter.kill()
    starter.wait()
    assert _wait(lambda: not any(_running(pid) for pid in pids))


def test_a_child_may_end_by_any_signal(start: Start, tmp_path: Path) -> None:
    """Python has no name for most real-time signals; a child that one of them ended is told all the same."""
    with start(tmp_path / "log", "import os; os.kill(os.getpid(), 40)") as child:
        assert child.wait_exit(60.0)
        assert child.exit_status() == "killed by SIGRTMIN+6"
    names = ["SIGKILL", "signal 33", "SIGRTMIN", "SIGRTMAX", "signal 99"]
    assert [signal_name(number) for number in (9, 33, 34, 64, 99)] == names


def test_sigkill_of_the_minder_ends_the_child(start: Start, tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    child = start(tmp_path / "log", FAMILY, str(pids_file))
    pid, grandchild = _family_pids(pids_file)
    try:
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        assert _wait(lambda: not _running(pid) and not child.alive())
        assert child.exit_status() == "killed by SIGKILL"
    finally:
        child.terminate()
        os.kill(grandchild, signal.SIGKILL)  # in a session of its own and without its minder


def test_terminate_kills_what_ignores_sigterm(start: Start, tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY
    child = start(tmp_path / "log", ignoring, str(pids_file))
    pids = _family_pids(pids_file)
    assert child.pid == pids[0] and child.alive()
    begin = time.monotonic()
    child.terminate(timeout_s=0.3)
    assert 0.3 <= time.monotonic() - begin < here_s(5)
    assert not child.alive() and not any(_running(pid) for pid in pids)
    child.terminate()


@pytest.mark.parametrize(
    ("grace_s", "status", "last"), [(10.0, "exit code 7", "goodbye"), (0.0, "killed by SIGKILL", "ready")]
)
def test_terminate_lets_the_child_end_by_itself(
    start: Start, tmp_path: Path, grace_s: float, status: str, last: str
) -> None:
    """Without a grace it is not asked."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('goodbye', flush=True), sys.exit(7)))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    child = start(tmp_path / "log", code)
    child.wait_until(lambda: "ready" in child.log_tail(), 10.0, "ready")
    child.terminate(timeout_s=grace_s)
    assert (child.exit_status(), child.log_tail(1)) == (status, last)


def test_end_of_the_main_process_ends_its_orphans(start: Start, tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    child = start(tmp_path / "log", FAMILY.replace("time.sleep(600)\n", ""), str(pids_file))
    _, grandchild = _family_pids(pids_file)
    assert _wait(lambda: not child.alive() and not _running(grandchild))
    assert child.exit_status() == "exit code 0"


def test_wait_until_shows_status_and_log_of_a_dead_child(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_text("from an earlier start\n")
    child = start(log, "import sys; sys.exit('no such weights')")
    begin = time.monotonic()
    with pytest.raises(ChildExited) as error:
        child.wait_until(lambda: False, 60.0, "start of X")
    assert time.monotonic() - begin < here_s(10)
    message = str(error.value)
    assert all(part in message for part in ("start of X", "exit code 1", "no such weights", str(log))), message
    assert "earlier start" not in message and "earlier start" in log.read_text()
    assert not error.value.address_in_use
    error = pickle.loads(pickle.dumps(ChildExited("engine 0: the process ended", "bind: Address already in use")))
    assert str(error) == "engine 0: the process ended" and error.address_in_use


def test_a_command_that_ends_at_once_is_seen_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(subprocess.Popen[bytes]):
        """Is there only when the command has ended, as on a machine that runs others meanwhile."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    with open(os.devnull, "rb") as nothing:
        pid = process_minder.start_command([sys.executable, "-c", "raise SystemExit(3)"], nothing.fileno(), None)
    gc.collect()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1]) == 3


def test_wait_until_times_out_and_there_may_be_no_such_command(tmp_path: Path) -> None:
    code = "import time; print('still loading', flush=True); time.sleep(600)"
    with _start(tmp_path / "log", code, command=[sys.executable, "-c"]) as child:
        assert _wait(lambda: bool(child.log_tail()))
        with pytest.raises(RuntimeError, match="start of X: not there after 0 s(.|\n)*still loading"):
            child.wait_until(lambda: False, 0.1, "start of X")
    child = ChildProcess(["/nonexistent/program"], tmp_path / "log")
    with pytest.raises(ChildExited, match="exit code 127(.|\n)*cannot start /nonexistent/program"):
        child.wait_until(lambda: False, 10.0, "start")


def test_a_reserved_port_is_refused_to_others_and_free_for_the_server() -> None:
    with PortReservation("127.0.0.1") as reservation:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", reservation.port))
        # socket.create_server sets SO_REUSEADDR, as uvicorn, tokio and torch's TCPStore do.
        with socket.create_server(("127.0.0.1", reservation.port)):
            reservation.release()
            with pytest.raises(ValueError, match=f"--router-port: cannot bind 127.0.0.1:{reservation.port}"):
                PortReservation("127.0.0.1", reservation.port, flag="--router-port")


def test_a_stolen_port_leads_to_a_start_on_another(tmp_path: Path) -> None:
    thieves: list[socket.socket] = []
    tried: list[int] = []
    # A long backtrace follows the error.
    server = """
import socket, sys, time
try:
    s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
except OSError as error:
    sys.exit(f"{error}" + "\\n at a frame" * 60)
time.sleep(600)
"""

    def start(ports: list[int]) -> ChildProcess:
        tried.extend(ports)
        if len(tried) == 1:
            thieves.append(socket.create_server(("127.0.0.1", ports[0])))
        return ChildProcess([sys.executable, "-c", server, str(ports[0])], tmp_path / "log")

    def connects(port: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True

    def wait_ready(child: ChildProcess) -> None:
        # The thief accepts connections too, so the first child has to be waited for by its end.
        ready = (lambda: connects(tried[-1])) if len(tried) > 1 else (lambda: False)
        child.wait_until(ready, 20.0, "start")

    try:
        with start_on_free_ports(["127.0.0.1"], start, wait_ready) as child:
            assert child.alive()
            assert len(tried) >= 2  # another program of this machine may hold the second port
    finally:
        for thief in thieves:
            thief.close()


def test_a_secret_is_read_by_the_command_and_shown_by_nothing(start: Start, tmp_path: Path) -> None:
    """Its standard input has it, its log *** in its place, also if it comes in pieces; the system shows none."""
    secret = "s3cr3t-" * 6
    program = """
import os, sys, time
secret = sys.stdin.read()
assert sys.stdin.read() == ""
print(f"ServerArgs(api_key={secret!r}) {secret}{secret}", flush=True)
for part in (secret[:5], secret[5:20], secret[20:], "\\n", secret[:7], "other\\n"):
    os.write(2, part.encode())
    time.sleep(0.05)
print("x" * 300_000, secret, flush=True)
print("ready", flush=True)
time.sleep(600)
"""
    log = tmp_path / "log"
    with start(log, program, secret=secret) as child:
        assert _wait(lambda: "ready" in log.read_text())
        minder = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in (child.pid, minder):
            shown = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            assert secret.encode() not in shown
    text = log.read_text()
    assert secret not in text and text.startswith("ServerArgs(api_key='***') ******\n***\n" + secret[:7] + "other\n")
    assert text.count("***") == 5 and "x" * 300_000 + " ***\nready\n" in text


def test_many_threads_may_wait_for_one_end_and_what_a_command_writes_last_is_in_the_log(
    start: Start, tmp_path: Path
) -> None:
    """Threads as an engine's actor has them: all learn how it ended, and no other file is closed. What
    it writes is the beginning of its secret, of which no more comes.
    """
    code = "import sys, time; text = sys.stdin.read(); time.sleep(0.3); sys.stderr.write(text[:4]); sys.exit(3)"
    with start(tmp_path / "log", code, secret="abcdefgh") as child, ThreadPoolExecutor(8) as pool:
        ended = [pool.submit(child.wait_exit, 60.0) for _ in range(8)]
        assert all(one.result(60) for one in ended)
        assert child.exit_status() == "exit code 3"
    assert (tmp_path / "log").read_text() == "abcd"


def test_a_fork_is_shown_as_the_server_that_it_is(start: Start, tmp_path: Path) -> None:
    """By its command line, which the tests of whole runs look for; it has the threads that it was asked for."""
    program = "import torch, time; print('threads', torch.get_num_threads(), flush=True); time.sleep(600)"
    with start(tmp_path / "log", program, "--random-seed", "43") as child:
        child.wait_until(lambda: "threads" in child.log_tail(), 60.0, "ready")
        shown = Path(f"/proc/{child.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        is_forked = isinstance(child._minder, ForkedMinder)
        assert is_forked == (start.keywords["command"][-1] == SERVER_MODULE)
        if is_forked:
            assert shown.startswith(f"{sys.executable} -m {SERVER_MODULE} ") and " --random-seed 43 " in shown
            assert child.log_tail() == "threads 1"


@pytest.mark.parametrize(
    "change", [{"RAY_AUTH_TOKEN": "another"}, {FOLDER_VARIABLE: "/nowhere"}, {"HF_HUB_OFFLINE": "x"}]
)
def test_without_a_nursery_it_is_started_as_usual(
    nursery: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    for name, value in {FOLDER_VARIABLE: str(nursery), "RAY_AUTH_TOKEN": TOKEN, **change}.items():
        monkeypatch.setenv(name, value)
    with open(tmp_path / "log", "ab") as log, socket.socketpair()[0] as control:
        assert fork_server([sys.executable, "-m", SERVER_MODULE], control, log, dict(os.environ)) is None


def test_a_minder_that_ends_at_that_moment_is_killed_all_the_same() -> None:
    ours, theirs = os.pipe()
    forked = ForkedMinder(2**22 + 1, ours)  # no such process, and no word of its end yet
    forked.kill()
    del forked
    os.set_blocking(theirs, False)
    with pytest.raises(BrokenPipeError):  # the other end is closed
        os.write(theirs, b"0")
    os.close(theirs)


def test_a_minder_that_fails_says_so(nursery: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not told as one that was killed."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(nursery))
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    ours, theirs = socket.socketpair()
    with ours, theirs, open(tmp_path / "log", "ab") as log:
        forked = fork_server([sys.executable, "-m", SERVER_MODULE], theirs, log, dict(os.environ))
        assert forked is not None
        ours.sendall(b"no number\n")
        assert _wait(lambda: forked.poll() is not None)
    assert forked.returncode == 1 and "ValueError" in (tmp_path / "log").read_text()


def test_an_engine_of_several_ranks_is_forked(tmp_path: Path, tiny_model: Path) -> None:
    """Its environment differs from that of the branch in what each rank reads when it begins."""
    branch = engine_branch(str(tiny_model), tmp_path)
    options = {"index": 0, "model_path": str(tiny_model), "device": "cpu", "dtype": "float32", "gpu_ids": ()}
    options |= {"host": "127.0.0.1", "api_key": None, "log_dir": "", "seed": 0}
    one, two = (server_environment(EngineSpec(tp_size=size, **options)) for size in (1, 2))
    names = {name for name in (*one, *two) if name.startswith(tuple(branch.kept)) and one.get(name) != two.get(name)}
    assert {"SGLANG_CPU_OMP_THREADS_BIND"} == names <= set(branch.free)


# It joins the group, and starts a child that takes more than the group has.
JOINING_STARTER = """
import os, sys
from pathlib import Path
from fusionrl.engines.process import ChildProcess
from tests.clock import here_s
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
FIRST = "open('/proc/self/oom_score_adj', 'w').write('1000')"  # of all the kernel kills this one
GREEDY = f"{FIRST}; print('loading', flush=True); bytearray(b'x') * (1 << 30)"
child = ChildProcess([sys.executable, "-c", GREEDY], sys.argv[2])
assert child.wait_exit(30.0)
print(child.died("/generate of engine 0"))
"""


def test_a_child_over_the_memory_of_its_control_group(tmp_path: Path) -> None:
    parent = writable_parent()
    if parent is None:
        pytest.skip("this user may make no control groups here: tests/base/test_memory_groups.py has the files alone")
    group = MemoryCgroup(parent, 256 << 20)
    try:
        command = [sys.executable, "-c", JOINING_STARTER, str(group.oom_events.parent), str(tmp_path / "engine-0.log")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        group.remove()
    assert ran.returncode == 0, ran.stderr
    first, last = ran.stdout.strip().splitlines()
    assert first.startswith("/generate of engine 0: the process ended (killed by SIGKILL). Since ")
    assert f" the kernel of {socket.gethostname()} has killed a process of this run" in first
    assert f"its control group (limit 0.2 GiB, {group.oom_events.parent})" in first
    assert last == "loading"
