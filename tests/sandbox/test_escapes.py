"""Programs that try to escape: in both modes, as root and as another user, and without a sandbox (they succeed)."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.escapes import ESCAPES, Escape, program, programs
from tests.sandbox.users import REPO, Sandbox, alive, each_mode_crossed, readable_python

SHORT = [escape for escape in ESCAPES if escape.is_short]
LONG = [escape for escape in ESCAPES if not escape.is_short]
# What a root who has kept a right could do: tried as each user, also where the launcher is root and has namespaces.
OF_RIGHTS = ("open a file by its handle", "trace the launcher", "become root", "keep a capability")
SLEEP = "import time; time.sleep(3600)"


@pytest.fixture(scope="module")
def targets(run: Sandbox) -> Iterator[dict[str, Any]]:
    """Files, sockets and a process that belong to the user of the sandbox; all but the rights of the mode are open."""
    yield from make_targets(run.uid, run.python)


def make_targets(uid: int, python: str) -> Iterator[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="fusionrl-escape-", dir="/tmp"))
    key = f"sk-{uuid.uuid4().hex}"
    (folder / "labels.jsonl").write_text("secret")
    (folder / "labels.jsonl").chmod(0o666)
    folder.chmod(0o777)
    user: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": []} if uid != os.geteuid() else {}
    process = subprocess.Popen([python, "-S", "-c", SLEEP, key], env={"API_KEY": key}, cwd="/", **user)
    abstract = f"fusionrl-escape-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        unix.listen()
        with socket.socket(socket.AF_UNIX) as unnamed, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
            datagrams.bind(str(folder / "datagrams"))
            (folder / "datagrams").chmod(0o777)
            unnamed.bind("\0" + abstract)
            unnamed.listen()
            yield {
                "label": str(folder / "labels.jsonl"),
                "folder": str(folder),
                "source": str(REPO / "fusionrl" / "rewards" / "code.py"),
                "key": key,
                "pid": process.pid,
                "tcp": list(tcp.getsockname()),
                "unix": str(folder / "socket"),
                "datagrams": str(folder / "datagrams"),
                "abstract": abstract,
                "mark": uuid.uuid4().hex,
                "uid": uid,
            }
    assert process.poll() is None, "a program has ended a process outside of the sandbox"
    process.kill()
    process.wait()
    assert (folder / "labels.jsonl").read_text() == "secret"
    shutil.rmtree(folder)


def attempts(output: str) -> dict[str, str]:
    """Name → what is printed, of several in one program."""
    return {name: text for name, _, text in (part.partition("\n") for part in output.split("== ")[1:])}


def test_no_short_escape(run: Sandbox, targets: dict[str, Any]) -> None:
    result = run(programs(SHORT, targets), wall_s=60.0)
    made = attempts(result.stdout)
    assert list(made) == [escape.name for escape in SHORT] and "Error" not in result.stderr, result
    assert all("ESCAPED" not in text and ("tried" in text or "killed" in text) for text in made.values()), made


@pytest.mark.parametrize("escape", [e for e in LONG if e.name in OF_RIGHTS], ids=lambda escape: escape.name)
def test_no_escape_by_a_right(run: Sandbox, escape: Escape, targets: dict[str, Any]) -> None:
    check_kept_in(run, escape, targets)


@pytest.mark.parametrize("escape", [e for e in LONG if e.name not in OF_RIGHTS], ids=lambda escape: escape.name)
@each_mode_crossed
def test_no_escape(run: Sandbox, escape: Escape, targets: dict[str, Any]) -> None:
    check_kept_in(run, escape, targets)


def check_kept_in(run: Sandbox, escape: Escape, targets: dict[str, Any]) -> None:
    result = run(program(escape, targets), **{"wall_s": 20.0, **escape.limits})
    assert "ESCAPED" not in result.stdout, result
    assert "Error" not in result.stderr, (
        "the program is to fail by what the sandbox refuses, not by a mistake of its own"
    )
    assert "tried" in result.stdout or result.killed_by is not None, result
    if escape.name.startswith(("take ten times 400 MiB", "fill the disk")) and result.killed_by is not None:
        assert result.killed_by in ("memory", "disk"), result
    assert not alive(targets["mark"])


@pytest.fixture(scope="module")
def bare_targets() -> Iterator[dict[str, Any]]:
    yield from make_targets(os.geteuid(), readable_python() or sys.executable)


def test_without_a_sandbox_they_succeed(bare_targets: dict[str, Any], tmp_path: Path) -> None:
    """So that an attempt that could not succeed anyway proves nothing."""
    text = programs([escape for escape in ESCAPES if escape.bare], bare_targets)
    # In a session of its own, as it may signal its group.
    found = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, start_new_session=True, check=False
    )
    Path(bare_targets["label"]).write_text("secret")
    made = attempts(found.stdout)
    assert list(made) == [escape.name for escape in ESCAPES if escape.bare]
    assert all("ESCAPED" in text for text in made.values()), found
