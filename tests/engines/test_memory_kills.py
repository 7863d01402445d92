"""A child that the kernel kills, as the memory of its control group is full: its error says so."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.sandbox.cgroup import MemoryCgroup, writable_parent

# It joins the group, and starts a child that takes more than the group has.
_STARTER = """
import os, sys
from pathlib import Path
from fusionrl.engines.process import ChildProcess
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
        command = [sys.executable, "-c", _STARTER, str(group.oom_events.parent), str(tmp_path / "engine-0.log")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        group.remove()
    assert ran.returncode == 0, ran.stderr
    first, last = ran.stdout.strip().splitlines()
    assert first.startswith("/generate of engine 0: the process ended (killed by SIGKILL). Since ")
    assert f" the kernel of {socket.gethostname()} has killed a process of this run" in first
    assert f"its control group (limit 0.2 GiB, {group.oom_events.parent})" in first
    assert last == "loading"
