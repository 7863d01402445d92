"""ChildProcess, port reservation: the failures are made to happen."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusionrl.base.signal_names import signal_name
from fusionrl.engines.process import (
    ChildExited,
    ChildProcess,
    PortReservation,
    interface_of,
    start_on_free_ports,
)

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
child = ChildProcess([sys.executable, "-c", sys.argv[1], sys.argv[2]], sys.argv[3])
subprocess.Popen(["sleep", "20"])                 # a later child by exec ...
if os.fork() == 0: time.sleep(20); os._exit(0)    # ... and one by fork must not keep the socket open
time.sleep(600)
"""


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait(predicate, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if predicate():
            return True
        time.sleep(0.02)
    return False


def _family_pids(path: Path) -> list[int]:
    assert _wait(path.exists)
    return [int(pid) for pid in path.read_text().split()]


def test_sigkill_of_the_starter_leaves_no_descendant(tmp_path: Path) -> None:
    pids_file, log = tmp_path / "pids", tmp_path / "log"
    starter = subprocess.Popen([sys.executable, "-c", STARTER, FAMILY, str(pids_file), str(log)])
    pids = _family_pids(pids_file)
    assert all(_running(pid) for pid in pids)
    starter.kill()
    starter.wait()
    assert _wait(lambda: not any(_running(pid) for pid in pids), 5.0)


def test_a_child_may_end_by_any_signal(tmp_path: Path) -> None:
    """Python has no name for most real-time signals; a child that one of them ended is told all the same."""
    with ChildProcess([sys.executable, "-c", "import os; os.kill(os.getpid(), 40)"], tmp_path / "log") as child:
        assert child.wait_exit(60.0)
        assert child.exit_status() == "killed by SIGRTMIN+6"
    assert [signal_name(number) for number in (9, 33, 34, 64, 99)] == [
        *("SIGKILL", "signal 33", "SIGRTMIN", "SIGRTMAX", "signal 99")
    ]


def test_sigkill_of_the_minder_ends_the_child(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    child = ChildProcess([sys.executable, "-c", FAMILY, str(pids_file)], tmp_path / "log")
    pid, grandchild = _family_pids(pids_file)
    try:
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        assert _wait(lambda: not _running(pid) and not child.alive(), 5.0)
        assert child.exit_status() == "killed by SIGKILL"
    finally:
        child.terminate()
        os.kill(grandchild, signal.SIGKILL)  # in a session of its own and without its minder


def test_terminate_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY
    child = ChildProcess([sys.executable, "-c", ignoring, str(pids_file)], tmp_path / "log")
    pids = _family_pids(pids_file)
    assert child.pid == pids[0]
    assert child.alive()
    begin = time.monotonic()
    child.terminate(timeout_s=0.3)
    assert 0.3 <= time.monotonic() - begin < 5.0
    assert not child.alive()
    assert not any(_running(pid) for pid in pids)
    child.terminate()


def test_terminate_lets_the_child_end_by_itself(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('goodbye', flush=True), sys.exit(7)))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    child = ChildProcess([sys.executable, "-c", code], tmp_path / "log")
    child.wait_until(lambda: "ready" in child.log_tail(), 10.0, "ready")
    child.terminate(timeout_s=10.0)
    assert child.exit_status() == "exit code 7"
    assert child.log_tail(1) == "goodbye"


def test_terminate_without_a_grace_asks_nobody(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    child = ChildProcess([sys.executable, "-c", code], tmp_path / "log")
    child.wait_until(lambda: "ready" in child.log_tail(), 10.0, "ready")
    child.terminate(timeout_s=0.0)
    assert child.exit_status() == "killed by SIGKILL"
    assert child.log_tail() == "ready"


def test_end_of_the_main_process_ends_its_orphans(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    child = ChildProcess(
        [sys.executable, "-c", FAMILY.replace("time.sleep(600)\n", ""), str(pids_file)], tmp_path / "l"
    )
    _, grandchild = _family_pids(pids_file)
    assert _wait(lambda: not child.alive() and not _running(grandchild), 5.0)
    assert child.exit_status() == "exit code 0"


def test_wait_until_shows_status_and_log_of_a_dead_child(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_text("from an earlier start\n")
    child = ChildProcess([sys.executable, "-c", "import sys; sys.exit('no such weights')"], log)
    begin = time.monotonic()
    with pytest.raises(ChildExited) as error:
        child.wait_until(lambda: False, 60.0, "start of X")
    assert time.monotonic() - begin < 10.0
    message = str(error.value)
    for part in ("start of X", "exit code 1", "no such weights", str(log)):
        assert part in message
    assert "earlier start" not in message
    assert "earlier start" in log.read_text()
    assert not error.value.address_in_use


def test_wait_until_times_out(tmp_path: Path) -> None:
    code = "import time; print('still loading', flush=True); time.sleep(600)"
    with ChildProcess([sys.executable, "-c", code], tmp_path / "log") as child:
        assert _wait(lambda: bool(child.log_tail()))
        with pytest.raises(RuntimeError, match="start of X: not there after 0 s(.|\n)*still loading"):
            child.wait_until(lambda: False, 0.1, "start of X")


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
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
    server = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"

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
        ready = (lambda: connects(tried[1])) if len(tried) > 1 else (lambda: False)
        child.wait_until(ready, 20.0, "start")

    try:
        with start_on_free_ports("127.0.0.1", 1, start, wait_ready) as child:
            assert child.alive()
            assert len(tried) == 2
    finally:
        for thief in thieves:
            thief.close()


def test_interface_of_loopback_and_of_an_unknown_address() -> None:
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("203.0.113.77") is None


def test_the_error_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ChildExited("engine 0: the process ended", "bind: Address already in use")))
    assert isinstance(error, ChildExited)
    assert str(error) == "engine 0: the process ended" and error.address_in_use


def test_a_secret_is_read_by_the_command_and_shown_by_nothing(tmp_path: Path) -> None:
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
    with ChildProcess([sys.executable, "-c", program], log, secret=secret) as child:
        assert _wait(lambda: "ready" in log.read_text())
        minder = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in (child.pid, minder):
            shown = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            assert secret.encode() not in shown
    text = log.read_text()
    assert secret not in text and text.startswith("ServerArgs(api_key='***') ******\n***\n" + secret[:7] + "other\n")
    assert text.count("***") == 5 and "x" * 300_000 + " ***\nready\n" in text


def test_what_a_command_with_a_secret_writes_last_is_in_the_log(tmp_path: Path) -> None:
    """Also the beginning of the secret, if no more of it came, and the exit code."""
    log = tmp_path / "log"
    code = "import sys; sys.stderr.write(sys.stdin.read()[:4]); sys.exit(3)"
    child = ChildProcess([sys.executable, "-c", code], log, secret="abcdefgh")
    assert child.wait_exit(15)
    assert child.exit_status() == "exit code 3"
    assert log.read_text() == "abcd"
