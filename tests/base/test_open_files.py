"""A run opens as many files as its machine allows, and so do the processes that it starts."""

import resource

import pytest

from fusionrl.base import process
from tests.own_process import run_code

PROGRAM = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from fusionrl.base.process import most_open_files, raise_open_files
assert most_open_files() == raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_a_process_and_those_that_it_starts() -> None:
    assert int(run_code(PROGRAM)) == process.most_open_files() > 256


def test_no_limit_is_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may say "infinity" or a billion, and programs that close every number would take minutes."""
    for hard in (resource.RLIM_INFINITY, 1 << 30):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1024, hard))
        assert process.most_open_files() == 1 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert process.most_open_files() == 4096
