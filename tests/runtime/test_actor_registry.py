"""The error of an actor that died says if the kernel killed processes for want of memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionrl.base.memory_groups import MemoryKills
from fusionrl.runtime import actor_registry as module
from fusionrl.runtime.actor_registry import ActorRegistry, Member

GROUP = "sys/fs/cgroup/memory"


@pytest.mark.parametrize("kills", [0, 1])
def test_an_actor_that_the_kernel_killed(kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and the kernel's files are fakes: a real kill is in tests/engines/test_process.py."""
    files = {
        "proc/self/mountinfo": f"33 24 0:29 / /{GROUP} rw - cgroup cgroup rw,memory\n",
        "proc/self/cgroup": "4:memory:/\n",
        f"{GROUP}/memory.limit_in_bytes": f"{8 << 30}\n",
        f"{GROUP}/memory.oom_control": "oom_kill 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "MemoryKills", lambda: MemoryKills(tmp_path))
    member: Any = Member("trainer rank 3", SimpleNamespace(), tmp_path / "trainer-3.log")  # type: ignore[arg-type]
    registry = ActorRegistry()
    monkeypatch.setattr(registry, "_dead", lambda error: [(member, "its process 4711 ended")])
    (tmp_path / GROUP / "memory.oom_control").write_text(f"oom_kill {kills}\n")
    said = str(registry.explain(OSError("Connection closed")))
    assert said.startswith("trainer rank 3 died: its process 4711 ended. ")
    assert ("limit 8.0 GiB" in said and "raise the limit" in said) == bool(kills)
