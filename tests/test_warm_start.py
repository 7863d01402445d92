"""Branches of a run that are forks of a nursery which several runs share."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fusionrl.base.environment import extended_environment
from fusionrl.base.nursery import Branch, Order
from fusionrl.base.nursery_client import ask
from fusionrl.base.process import ROOM
from fusionrl.runtime.early_start import start_nursery
from fusionrl.runtime.guard import TOKEN_VARIABLE
from tests import warm_start
from tests.own_process import carriers, wait_until
from tests.warm_start import ROOM_VARIABLE, WARM_VARIABLE, WarmBranches, warm_branch

MODULE = """
import json, os, sys
IMPORTED_BY = os.getpid()
os.environ["SET_BY_THE_IMPORT"] = "1"

def tell(arguments):
    print(json.dumps({"by": IMPORTED_BY, "set": os.environ.get("SET_BY_THE_IMPORT"), "own": os.environ.get("OWN")}))
    sys.stdout.flush()
    sys.stdin.read()  # until the test has looked at it
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a socket's has 107 characters."""
    with tempfile.TemporaryDirectory(prefix="warm-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, str]]:
    """Variables of a nursery, whose branch "kind" has imported a module."""
    with tempfile.TemporaryDirectory(prefix="warm-") as name:
        home = Path(name)
        (home / "once.py").write_text(MODULE)
        with extended_environment({"PYTHONPATH": str(home), ROOM_VARIABLE: " " * ROOM}):
            order = Order("the key", [warm_branch(_branch(home), ["PYTEST_CURRENT_TEST", "FREE"])])
            nursery = start_nursery(home, order.to_line())
            try:
                wait_until((home / "kind").exists)
                (home / "key").write_text("the key")
                yield {WARM_VARIABLE: str(home)}
            finally:
                nursery.kill()
                nursery.communicate()


def _branch(folder: Path) -> Branch:
    return Branch(str(folder / "kind"), ["once"], "once:tell", {"OF_THE_BRANCH": "1"}, kept=["KEPT_"])


@contextmanager
def _branches(shared: dict[str, str], folder: Path, **more: str) -> Iterator[WarmBranches]:
    with extended_environment({**shared, **more}):
        branches = WarmBranches(Order("own key", [_branch(folder)]), folder / "log")
    try:
        yield branches
    finally:
        branches.close()


def _ask(folder: Path, **more: str) -> dict:
    """What a fork of the run's branch tells."""
    out = folder / "out"
    read, write = os.pipe()
    with out.open("wb") as target:
        ask(str(folder / "kind"), "own key", [], {**os.environ, **more}, (read, target.fileno(), target.fileno()))
    os.close(read)
    wait_until(lambda: out.read_text().endswith("\n"))
    os.close(write)
    return json.loads(out.read_text())


def test_two_runs_share_the_imports_and_nothing_else(shared: dict[str, str], folder: Path) -> None:
    told = []
    for name in ("first", "second"):
        (folder / name).mkdir()
        with _branches(shared, folder / name, FREE=name):
            with pytest.raises(ConnectionError):
                ask(str(folder / name / "kind"), "the key", [], dict(os.environ), ())
            told.append(_ask(folder / name, OWN=name))
    assert told[0]["by"] == told[1]["by"] and [one["own"] for one in told] == ["first", "second"]
    assert [one["set"] for one in told] == ["1", "1"], "what the import has set is kept"


def test_it_carries_the_run_s_mark(shared: dict[str, str], folder: Path) -> None:
    """The system shows it among the branch's variables, and none of another run, which lives beside it."""
    marks = ("a" * 32, "b" * 32)
    with ExitStack() as stack:
        for mark in marks:
            (folder / mark[0]).mkdir()
            stack.enter_context(_branches(shared, folder / mark[0], **{TOKEN_VARIABLE: mark}))
        wait_until(lambda: all(len(carriers(mark)) == 1 for mark in marks))
        pids = [pid for mark in marks for pid in carriers(mark)]
        assert len(set(pids)) == 2 == len(pids)
        for pid in pids:
            shown = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert b"OF_THE_BRANCH=1" in shown and b"own key" not in b"".join(shown)
            assert not {name for name in shown if name.startswith(ROOM_VARIABLE.encode())}
    assert not any(carriers(mark) for mark in marks)


def test_it_ends_with_its_run(shared: dict[str, str], folder: Path) -> None:
    with _branches(shared, folder, **{TOKEN_VARIABLE: "c" * 32}) as branches:
        branches.stdin.close()  # as at the death of the command
        branches.wait()
        assert not carriers("c" * 32)  # without `kill`


def test_another_environment_gets_none(shared: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one who comes after a change of the code."""
    refused = pytest.raises(ConnectionRefusedError, match="another value of ANOTHER")
    with refused, _branches(shared, folder, ANOTHER="1"):
        pass
    assert not (folder / "kind").exists()
    monkeypatch.setattr(warm_start, "SOURCES", folder)
    (folder / "changed.py").touch()
    with pytest.raises(OSError, match="changed.py is younger"), _branches(shared, folder):
        pass
