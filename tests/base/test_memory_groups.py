"""Limits of memory by control groups, and the kernel's kills, as both versions of control groups have them."""

from pathlib import Path

import pytest

from fusionrl.base.memory_groups import MemoryKills, group_chains, limited_groups, num_memory_kills

GIB = 2**30
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
_MOUNTS = {
    V1: "33 24 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    V2: "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
}
_FILES = {
    V1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    V2: ("memory.max", "memory.current", "memory.events.local"),
}


def machine(root: Path, mount: str, limits: dict[str, float], kills: int = 0) -> Path:
    """A root on which this process is in the group /jobs/7/step. `limits`: group → bytes; each uses 3 GiB, of which
    1 GiB are files; in version 1 the innermost group alone has them."""
    is_v1 = mount == V1
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/mountinfo").write_text(_MOUNTS[mount] + "\n")
    (root / "proc/self/cgroup").write_text(f"{'4:memory' if is_v1 else '0:'}:/jobs/7/step\n")
    for group in ("", "jobs", "jobs/7", "jobs/7/step"):
        is_ours = group == "jobs/7/step"
        total = f"\ntotal_inactive_file {GIB}" * is_v1
        texts = [limits.get(group, 2**63 - 4096 if is_v1 else "max"), 3 * GIB, f"oom_kill {kills * is_ours}"]
        texts.append(f"anon 5\ninactive_file {GIB * (is_ours or not is_v1)}{total}")
        (root / mount / group).mkdir(parents=True, exist_ok=True)
        for name, text in zip([*_FILES[mount], "memory.stat"], texts, strict=True):
            (root / mount / group / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize("mount", [V1, V2])
def test_the_limit_of_a_job_is_that_of_a_group_above(mount: str, tmp_path: Path) -> None:
    """Slurm and systemd limit a group above the one in which the process is."""
    (found,) = limited_groups(machine(tmp_path, mount, {"jobs/7": 8 * GIB}))
    assert (found.folder, found.limit, found.used) == (tmp_path / mount / "jobs/7", 8 * GIB, 2 * GIB)
    assert limited_groups(tmp_path / "nothing") == []


def test_a_container_sees_its_group_as_the_top(tmp_path: Path) -> None:
    """Without a namespace of its own, its group's path is that of the machine, and so is the top of its mount."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(_MOUNTS[V1].replace(" / ", " /docker/4711 ", 1) + "\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/4711\n0::/docker/4711\n")
    assert group_chains(tmp_path) == [[tmp_path / V1]]


@pytest.mark.parametrize("mount", [V1, V2])
def test_kills_are_told_with_the_limit_and_the_cure(mount: str, tmp_path: Path) -> None:
    machine(tmp_path, mount, {"jobs/7": 8 * GIB, "jobs": 64 * GIB}, kills=2)
    kills = MemoryKills(tmp_path)
    (tmp_path / mount / "jobs/7/step/memory.events").write_text("oom_kill 9\n")  # with groups below, as the sandbox's
    assert num_memory_kills(tmp_path) == 2 and kills.sentence() == "", "they were before"
    machine(tmp_path, mount, {"jobs/7": 8 * GIB, "jobs": 64 * GIB}, kills=3)
    said = kills.sentence()
    assert "has killed a process of this run or of its control group, because" in said
    assert f"of its control group (limit 8.0 GiB, {tmp_path / mount / 'jobs/7'}) or of the machine was full" in said
    assert "raise the limit" in said and "fusionrl plan" in said
    machine(tmp_path, mount, {}, kills=5)
    assert "3 processes" in kills.sentence() and "the memory of the machine was full" in kills.sentence()
