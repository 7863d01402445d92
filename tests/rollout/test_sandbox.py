"""The sandbox, attacked for real: with namespaces where the kernel grants them, and without."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fusionrl.rollout.sandbox import Limits, SandboxResult, run_python, run_python_sync

HAS_NAMESPACES = run_python_sync("").processes == "pid namespace"
KINDS = [
    pytest.param(
        True, marks=pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel grants no namespaces"), id="namespaces"
    ),
    pytest.param(False, id="plain"),
]


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest) -> Callable[..., SandboxResult]:
    """run(code, stdin="", limit=…) with and without namespaces."""

    def start(code: str, stdin: str = "", **limits: float) -> SandboxResult:
        return run_python_sync(code, stdin=stdin, limits=Limits(namespaces=request.param, **limits))  # type: ignore[arg-type]

    start.namespaces = request.param  # type: ignore[attr-defined]
    return start


def alive(mark: str) -> list[int]:
    """Processes on this machine whose command line has `mark`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in part for part in process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def test_output_input_and_exit_code(run: Callable[..., SandboxResult]) -> None:
    result = run("import sys\nprint(input() * 2)\nprint('é', file=sys.stderr)\nsys.exit(3)", stdin="ab\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("abab\n", "é\n", 3)
    assert (result.timed_out, result.killed_by, result.ok) == (False, None, False)
    result = run("1/0")
    assert "main.py" in result.stderr and "ZeroDivisionError" in result.stderr
    assert run("import numpy; print(numpy.arange(3).sum())").stdout == "3\n"
    large = "x" * (1 << 20)
    assert run("print(len(input()))", stdin=large).stdout == f"{1 << 20}\n"


def test_nothing_is_inherited(run: Callable[..., SandboxResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TEST", "1")
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        code = (
            "import os\nprint('SECRET_OF_THE_TEST' in os.environ, os.listdir('.'))\n"
            "for number in range(3, 256):\n"
            "    try: os.fstat(number); print('open', number)\n"
            "    except OSError: pass"
        )
        assert run(code).stdout == "False ['main.py']\n"
    finally:
        os.close(read_end)
        os.close(write_end)


def test_an_endless_loop_ends_at_its_cpu_time(run: Callable[..., SandboxResult]) -> None:
    result = run("while True: pass", cpu_s=1, wall_s=60)
    assert (result.killed_by, result.timed_out, result.ok) == ("CPU time", False, False)
    # One that ignores the warning is killed a second later.
    stubborn = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(stubborn, cpu_s=1, wall_s=60).killed_by == "SIGKILL"


def test_a_sleeper_ends_at_its_wall_time_and_its_output_stays(run: Callable[..., SandboxResult]) -> None:
    start = time.perf_counter()
    result = run("import time; print('begun'); time.sleep(3600)", wall_s=1)
    assert (result.stdout, result.timed_out, result.exit_code, result.killed_by) == ("begun\n", True, None, "wall time")
    assert time.perf_counter() - start < 20


def test_a_memory_bomb_is_refused_its_memory(run: Callable[..., SandboxResult]) -> None:
    result = run("x = bytearray(1 << 30); print('had it')", memory_bytes=256 << 20)
    assert result.stdout == ""
    assert "MemoryError" in result.stderr


def test_a_fork_bomb_is_bounded_and_leaves_nothing(run: Callable[..., SandboxResult]) -> None:
    """Each process forks on and on; the mark stands in their command lines, for all of them to be found."""
    mark = uuid.uuid4().hex
    code = (
        "import os, sys\n"
        f"if len(sys.argv) == 1: os.execv(sys.executable, [sys.executable, '-S', __file__, '{mark}'])\n"
        "while True:\n"
        "    try: os.fork()\n"
        "    except OSError as error:\n"
        "        print('refused', flush=True); break\n"
        "import time; time.sleep(3600)"
    )
    result = run(code, num_processes=20, wall_s=2, cpu_s=2)
    assert 1 <= result.stdout.count("refused") <= 20
    assert alive(mark) == []


def test_a_double_forked_daemon_does_not_outlive_the_run(run: Callable[..., SandboxResult]) -> None:
    mark = uuid.uuid4().hex
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(3600)', '{mark}'])\n"
        "    os._exit(0)\n"
        "time.sleep(0.3); print('done')"
    )
    start = time.perf_counter()
    result = run(code, wall_s=60)
    assert (result.stdout, result.exit_code) == ("done\n", 0)
    assert alive(mark) == []
    assert time.perf_counter() - start < 30, "the daemon holds stdout open; the run must not wait for it"
    assert result.processes == ("pid namespace" if run.namespaces else "subreaper")  # type: ignore[attr-defined]


def test_an_output_flood_is_cut_and_said_so(run: Callable[..., SandboxResult]) -> None:
    result = run("import sys\nfor _ in range(100): sys.stdout.write('x' * 10000)\nprint('e', file=sys.stderr)")
    assert result.exit_code == 0
    assert (result.stdout_cut, result.stderr_cut) == (True, False)
    assert result.stdout == "x" * (64 << 10) + f"\n[output cut: {64 << 10} of 1000000 bytes are shown]"


def test_large_files_are_refused(run: Callable[..., SandboxResult]) -> None:
    result = run("f = open('a', 'wb')\nf.write(bytes(2 << 20)); f.flush()", file_bytes=1 << 20)
    assert "File too large" in result.stderr
    assert run("open('a', 'wb').write(bytes(1 << 19)); print('kept')", file_bytes=1 << 20).stdout == "kept\n"


def test_a_file_flood_is_bounded() -> None:
    if not HAS_NAMESPACES:
        pytest.skip("this kernel grants no namespaces")
    many = "n = 0\ntry:\n    while True: open(f'f{n}', 'w').close(); n += 1\nexcept OSError: print(n)"
    assert run_python_sync(many, limits=Limits(num_files=50)).stdout == "50\n"
    much = many.replace("open(f'f{n}', 'w').close()", "__import__('pathlib').Path(f'f{n}').write_bytes(bytes(1 << 20))")
    assert run_python_sync(much, limits=Limits(disk_bytes=8 << 20)).stdout == "7\n", "main.py has a page of the 8 MiB"


def test_files_elsewhere_are_out_of_reach(tmp_path: Path) -> None:
    if not HAS_NAMESPACES:
        pytest.skip("this kernel grants no namespaces")
    target = tmp_path / "weights"
    target.write_text("precious")
    code = (
        f"import os\npaths = [{str(target)!r}, {str(Path(__file__))!r}, '/etc/x', '/dev/shm/x', '/var/tmp/x']\n"
        "for path in paths:\n"
        "    for act in (lambda: open(path, 'a'), lambda: os.remove(path)):\n"
        "        try: act(); print('could', path)\n"
        "        except OSError: pass\n"
        "print(sum(name.isdigit() for name in os.listdir('/proc')))"
    )
    result = run_python_sync(code)
    assert result.stdout in ("2\n", "0\n"), "init and the code itself are all it sees"
    assert target.read_text() == "precious"


def test_the_folder_is_removed(run: Callable[..., SandboxResult]) -> None:
    folder = run("import os; open('left', 'w').close(); print(os.getcwd())").stdout.strip()
    assert folder.startswith("/")
    assert folder == "/tmp" or not Path(folder).exists()
    assert not Path("/tmp/left").exists()


def test_the_network_is_out_of_reach(run: Callable[..., SandboxResult]) -> None:
    """A server on this very machine, which the test itself reaches."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        socket.create_connection(address, 5).close()
        code = (
            "import socket, subprocess, sys\n"
            'source = \'import socket; socket.create_connection(("127.0.0.1", %d), 5); print("connected")\' % '
            f"{address[1]}\n"
            "try: exec(source)\n"
            "except OSError as error: print('refused', flush=True)\n"
            "subprocess.run([sys.executable, '-c', source], stderr=subprocess.DEVNULL)\n"
        )
        result = run(code)
    assert result.stdout == "refused\n"
    expected = "network namespace" if run.namespaces else "seccomp"  # type: ignore[attr-defined]
    assert result.network == f"blocked by {expected}"


def test_local_sockets_are_out_of_reach(tmp_path: Path) -> None:
    """Services of the machine listen on sockets in the file system, which a network namespace does not cover."""
    if not HAS_NAMESPACES or not str(tmp_path).startswith("/tmp/"):
        pytest.skip("needs namespaces, and a test folder under /tmp")
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r}); print('connected')"
        assert "FileNotFoundError" in run_python_sync(code).stderr


def test_an_interpreter_under_tmp_shows_nothing_else_of_it(tmp_path: Path) -> None:
    if not HAS_NAMESPACES or not str(tmp_path).startswith("/tmp/"):
        pytest.skip("needs namespaces, and a test folder under /tmp")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (tmp_path / "secret").write_text("text")
    code = (
        "import os, pathlib; pathlib.Path('mine').write_text('ok'); print(pathlib.Path('mine').read_text())\n"
        f"print(os.path.exists({str(tmp_path / 'secret')!r}), os.listdir({str(tmp_path)!r}))"
    )
    driver = f"from fusionrl.rollout.sandbox import run_python_sync as run; print(run({code!r}))"
    paths = os.pathsep.join([os.getcwd(), *(path for path in sys.path if path.endswith("site-packages"))])
    found = subprocess.run(
        [tmp_path / "env/bin/python", "-c", driver],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ok\\nFalse ['env']\\n" in found.stdout, found


def test_many_at_once_do_not_disturb_each_other() -> None:
    async def all_of_them() -> list[SandboxResult]:
        code = "open('n', 'w').write(input()); import os; os.fork(); print(open('n').read() + ' ', end='')"
        limits = Limits(num_processes=3, wall_s=60)
        return await asyncio.gather(*(run_python(code, stdin=str(i), limits=limits) for i in range(50)))

    results = asyncio.run(all_of_them())
    assert [set(result.stdout.split()) for result in results] == [{str(i)} for i in range(50)]
    assert {result.exit_code for result in results} == {0}


def test_cancelling_ends_the_run(run: Callable[..., SandboxResult]) -> None:
    mark = uuid.uuid4().hex
    code = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])"

    async def cancel() -> None:
        task = asyncio.create_task(run_python(code, limits=Limits(namespaces=run.namespaces, wall_s=60)))  # type: ignore[attr-defined]
        while not alive(mark):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    for _ in range(100):
        if not alive(mark):
            break
        time.sleep(0.05)
    assert alive(mark) == []


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="sandbox limit wall_s=0: it must be positive"):
        Limits(wall_s=0)
