"""Limits, results and cleaning up of the sandbox, for real, in both modes; escapes have a file of their own."""

import asyncio
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from fusionrl.sandbox import Limits, SandboxError, SandboxResult, run_python, run_python_sync
from fusionrl.sandbox import run as sandbox_run
from fusionrl.sandbox.limits import MemoryCgroup
from fusionrl.sandbox.run import Run, _remove
from tests.sandbox.users import REPO, Sandbox, alive, each_mode, readable_python


@each_mode
def test_output_input_and_exit_code(run: Sandbox) -> None:
    result = run("import sys\nprint(input() * 2)\nprint('é', file=sys.stderr)\nsys.exit(3)", stdin="ab\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("abab\n", "é\n", 3)
    assert (result.timed_out, result.killed_by, result.ok) == (False, None, False)
    result = run("1/0")
    assert "main.py" in result.stderr and "ZeroDivisionError" in result.stderr
    if run.python == sys.executable:
        assert run("import numpy; print(numpy.arange(3).sum())").stdout == "3\n"
    large = "x" * (1 << 20)
    assert run("print(len(input()))", stdin=large).stdout == f"{1 << 20}\n"


def test_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert run_here(code).stdout == "False ['main.py']\n"
    finally:
        os.close(read_end)
        os.close(write_end)


def in_python(python: str | Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script by another interpreter, with this repository."""
    environment = {"PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    return subprocess.run([python, "-c", script], env=environment, cwd="/", capture_output=True, text=True, check=False)


def run_here(code: str, **limits: Any) -> SandboxResult:
    """In this process and the first mode that it may; skips the test where it may none."""
    for namespaces in (True, False):
        try:
            return run_python_sync(code, limits=Limits(namespaces=namespaces, **limits))
        except SandboxError as error:
            reason = str(error)
    pytest.skip(reason)


def test_an_endless_loop_ends_at_its_cpu_time(run: Sandbox) -> None:
    result = run("while True: pass", cpu_s=1, wall_s=60)
    assert (result.killed_by, result.timed_out, result.ok) == ("CPU time", False, False)
    if run.uid == os.geteuid():  # one that ignores the warning is killed a second later
        stubborn = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
        assert run(stubborn, cpu_s=1, wall_s=60).killed_by == "SIGKILL"


@each_mode
def test_a_sleeper_ends_at_its_wall_time_and_its_output_stays(run: Sandbox) -> None:
    for wall_s in (1, 5, 25):  # a busy machine may not get to the first word within a second
        start = time.perf_counter()
        result = run("import time; print('begun'); time.sleep(3600)", wall_s=wall_s)
        if result.stdout:
            break
    assert (result.stdout, result.timed_out, result.exit_code, result.killed_by) == ("begun\n", True, None, "wall time")
    assert time.perf_counter() - start < 20 + wall_s


@each_mode
def test_a_memory_bomb_is_refused_its_memory(run: Sandbox) -> None:
    result = run("x = bytearray(1 << 30); print('had it')", memory_bytes=256 << 20)
    assert result.stdout == ""
    assert "MemoryError" in result.stderr


def test_a_fork_bomb_is_bounded_and_leaves_nothing(run: Sandbox) -> None:
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
    for wall_s in (2, 10, 40):  # a busy machine may not get to the first fork within two seconds
        result = run(code, num_processes=20, wall_s=wall_s, cpu_s=2)
        if result.stdout:
            break
    assert 1 <= result.stdout.count("refused") <= 20
    assert not alive(mark)


@each_mode
def test_a_double_forked_daemon_does_not_outlive_the_run(run: Sandbox) -> None:
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
    assert not alive(mark)
    assert time.perf_counter() - start < 30, "the daemon holds stdout open; the run must not wait for it"


@each_mode
def test_an_output_flood_is_cut_and_said_so(run: Sandbox) -> None:
    result = run("import sys\nfor _ in range(100): sys.stdout.write('x' * 10000)\nprint('e', file=sys.stderr)")
    assert result.exit_code == 0
    assert (result.stdout_cut, result.stderr_cut) == (True, False)
    assert result.stdout == "x" * (64 << 10) + f"\n[output cut: {64 << 10} of 1000000 bytes are shown]"


@each_mode
def test_large_files_are_refused(run: Sandbox) -> None:
    result = run("f = open('a', 'wb')\nf.write(bytes(2 << 20)); f.flush()", file_bytes=1 << 20)
    assert "File too large" in result.stderr
    assert run("open('a', 'wb').write(bytes(1 << 19)); print('kept')", file_bytes=1 << 20).stdout == "kept\n"


def test_a_file_flood_is_bounded(run: Sandbox) -> None:
    """With namespaces to the byte; without, the watch ends the run soon after."""
    many = "n = 0\ntry:\n    while n < 3000: open(f'f{n}', 'w').close(); n += 1\nexcept OSError: pass\nprint(n)"
    found = run(many + "\nimport time; time.sleep(1)", num_files=50)
    much = many.replace("open(f'f{n}', 'w').close()", "__import__('pathlib').Path(f'f{n}').write_bytes(bytes(1 << 16))")
    large = run(much + "\nimport time; time.sleep(1)", disk_bytes=8 << 20, num_files=10_000)
    if run.namespaces:
        assert found.stdout == "50\n"
        assert large.stdout == "127\n", "main.py has a page of the 8 MiB"
    else:
        assert (found.killed_by, large.killed_by) == ("disk", "disk")


@pytest.mark.parametrize("cgroup", [True, False])
@each_mode
def test_all_processes_together_have_a_bound(run: Sandbox, cgroup: bool) -> None:
    """Each of the four stays below the limit, together they do not; what forks share counts once."""
    code = (
        "import os, time\nblock = bytearray(b'x') * (150 << 20)\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        if {writes}:\n"
        "            for i in range(0, len(block), 4096): block[i] = 1\n"
        "        time.sleep(1); os._exit(0)\n"
        "for _ in range(4): os.wait()\n"
        "print('had it')"
    )
    limits = {"memory_bytes": 400 << 20, "cgroup": cgroup, "wall_s": 30.0}
    assert run(code.replace("{writes}", "0"), **limits).stdout == "had it\n"
    result = run(code.replace("{writes}", "1"), **limits)
    assert (result.stdout, result.killed_by) == ("", "memory")


@each_mode
def test_real_time_signals_have_names(run: Sandbox) -> None:
    result = run("import os; os.kill(os.getpid(), 40)")
    assert (result.exit_code, result.killed_by) == (-40, "SIGRTMIN+6")


def test_an_answer_is_apart_from_the_output() -> None:
    try:
        result = run_python_sync("import os; print('x'); os.write(3, b'12345')", answer_bytes=4)
    except SandboxError as error:
        pytest.skip(str(error))
    assert (result.stdout, result.answer, result.answer_cut) == ("x\n", b"1234", True)


@pytest.mark.parametrize("namespaces", [True, False])
def test_descriptors_are_handed_over_in_order(namespaces: bool) -> None:
    """The answer's is 3; those of the caller follow, whatever their numbers are there."""
    script = (
        "import os, fusionrl.sandbox as s\n"
        "pipes = [os.pipe() for _ in range(3)]\n"
        "code = 'import os\\nfor number in range(4): os.write(3 + number, b\"%d\" % number)'\n"
        "own = [pipes[2][1], pipes[0][1], pipes[1][1]]\n"
        f"limits = s.Limits(namespaces={namespaces})\n"
        "try: result = s.run_python_sync(code, answer_bytes=9, descriptors=own, limits=limits)\n"
        "except s.SandboxError as error: print('skipped', error)\n"
        "else: print(result.mode, result.answer, [os.read(pipe[0], 9) for pipe in pipes])\n"
    )
    found = in_python(readable_python() or sys.executable, script)
    if found.stdout.startswith("skipped"):
        pytest.skip(found.stdout)
    mode = "namespaces" if namespaces else "weak"
    assert found.stdout == f"{mode} b'0' [b'2', b'3', b'1']\n", found


def test_no_weak_mode_unless_it_is_allowed() -> None:
    """In a process that may not make namespaces, as in most containers."""
    code = "os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n" if os.geteuid() == 0 else ""
    python = readable_python()
    if python is None:
        pytest.skip("no interpreter that every user can read")
    code += (
        "from fusionrl.sandbox.launcher import seccomp\n"
        "import fusionrl.sandbox as s\n"
        "seccomp.install([(0x20, 0, 0, 0), (0x15, 0, 1, seccomp.number_of('unshare')), (6, 0, 0, 0x50001),"
        " (6, 0, 0, 0x7FFF0000)])\n"
        "try: s.probe()\n"
        "except s.SandboxError as error: print(error)\n"
        "s.allow_weak(True)\n"
        "print(s.probe())\n"
    )
    found = in_python(python, "import os\n" + code)
    first, second = found.stdout.splitlines()
    assert "grants no namespaces" in first and "--allow-weak-sandbox" in first, found
    assert second.startswith("weak, seccomp") and "lacks: " in second


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_an_interpreter_that_nobody_can_read_is_said(tmp_path: Path) -> None:
    """As root without namespaces the code is another user, who may not read everything."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (tmp_path / "env").chmod(0o700)
    driver = "import fusionrl.sandbox as s; s.run_python_sync('', limits=s.Limits(namespaces=False))"
    found = in_python(tmp_path / "env/bin/python", driver)
    assert "cannot be read by user" in found.stderr and "chmod o+rX" in found.stderr


@each_mode
def test_the_folder_is_removed(run: Sandbox) -> None:
    folder = run("import os; open('left', 'w').close(); print(os.getcwd())").stdout.strip()
    assert folder.startswith("/")
    assert folder == "/tmp" or not Path(folder).exists()
    assert not Path("/tmp/left").exists()


def test_a_folder_is_removed_whatever_it_holds(tmp_path: Path) -> None:
    """Folders deeper than Python's stack and than a path, without rights, and links out of it."""
    folder, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "kept").touch()
    folder.mkdir()
    script = f"import os\nos.symlink({str(outside)!r}, 'link')\nos.mkdir('closed', 0)\n"
    script += "for i in range(2200): os.mkdir('d'); os.chdir('d'); open('f', 'w').close()\nos.chmod('.', 0)"
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True)
    _remove(str(folder))
    assert not folder.exists()
    assert (outside / "kept").exists() and outside.stat().st_mode & 0o777 == 0o755
    _remove(str(folder))  # it is not there: nothing to do, and no error


def test_an_interpreter_under_tmp_shows_nothing_else_of_it(tmp_path: Path) -> None:
    if not str(tmp_path).startswith("/tmp/") or run_here("").mode == "weak":
        pytest.skip("needs namespaces, and a test folder under /tmp")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (tmp_path / "secret").write_text("text")
    code = (
        "import os, pathlib; pathlib.Path('mine').write_text('ok'); print(pathlib.Path('mine').read_text())\n"
        f"print(os.path.exists({str(tmp_path / 'secret')!r}), os.listdir({str(tmp_path)!r}))"
    )
    driver = f"from fusionrl.rollout.sandbox import run_python_sync as run; print(run({code!r}))"
    paths = os.pathsep.join([str(REPO), *(path for path in sys.path if path.endswith("site-packages"))])
    found = in_python(tmp_path / "env/bin/python", driver, **os.environ | {"PYTHONPATH": paths})
    assert "ok\\nFalse ['env']\\n" in found.stdout, found


def test_many_at_once_do_not_disturb_each_other() -> None:
    async def all_of_them() -> list[SandboxResult]:
        code = "open('n', 'w').write(input()); import os; os.fork(); print(open('n').read() + ' ', end='')"
        limits = Limits(num_processes=3, wall_s=60)
        return await asyncio.gather(*(run_python(code, stdin=str(i), limits=limits) for i in range(50)))

    results = asyncio.run(all_of_them())
    assert [set(result.stdout.split()) for result in results] == [{str(i)} for i in range(50)]
    assert {result.exit_code for result in results} == {0}


def test_cancelling_ends_the_run() -> None:
    mark = uuid.uuid4().hex
    code = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])"
    namespaces = run_here("").mode == "namespaces"

    async def cancel() -> None:
        task = asyncio.create_task(run_python(code, limits=Limits(namespaces=namespaces, wall_s=60)))
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
    assert not alive(mark)


@each_mode
def test_children_that_have_ended_count_for_nothing(run: Sandbox) -> None:
    """A zombie hides its descriptors as a process does that wants to pass the limit on the disk."""
    code = "import os, time\nfor _ in range(5):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(0.5)\nprint('here')"
    result = run(code)
    assert (result.stdout, result.killed_by) == ("here\n", None)


def test_a_machine_without_the_means_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No folder, no descriptors: an error of the sandbox, which callers expect, and nothing is left open."""
    started: list[bool] = []
    before = os.listdir("/proc/self/fd")
    for name, patch in (
        ("tempfile.mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left on device"))),
        ("os.pipe", lambda: (_ for _ in ()).throw(OSError(24, "Too many open files"))),
    ):
        with monkeypatch.context() as context:
            context.setattr(name, patch)
            with pytest.raises(SandboxError, match="could not be set up: .*(No space|Too many)"):
                Run("", "", Limits(), answer_bytes=1).result(on_start=lambda: started.append(True))
    assert started == [True, True]
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_watch_bounds_what_a_cgroup_does_not_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refusing(MemoryCgroup):
        def __init__(self, *_: Any) -> None:
            self._folder = tmp_path / "missing"  # as a group that another process has removed

    monkeypatch.setattr(sandbox_run, "writable_parent", lambda: tmp_path)
    monkeypatch.setattr(sandbox_run, "MemoryCgroup", Refusing)
    result = run_here("print(1)")
    assert (result.stdout, result.memory) == ("1\n", "watch")


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="sandbox limit wall_s=0: it must be positive"):
        Limits(wall_s=0)
