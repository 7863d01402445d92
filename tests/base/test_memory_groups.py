"""Limits of memory by control groups, and the kernel's kills, as both versions of control groups have them."""

from __future__ import annotations

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


def machine(root: Path, mount: str, limits: dict[str, float], kills: int = 0, full: tuple[str, ...] = ()) -> Path:
    """A root on which this process is in the group /jobs/7/step. `limits`: group → bytes; each uses 3 GiB, of which
    1 GiB are files; in version 1 the innermost group alone has them. `full`: groups whose limit was reached, each as
    often as it was."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/mountinfo").write_text(_MOUNTS[mount] + "\n")
    (root / "proc/self/cgroup").write_text(f"{'4:memory' if mount == V1 else '0:'}:/jobs/7/step\n")
    most, now, events = _FILES[mount]
    for group in ("", "jobs", "jobs/7", "jobs/7/step"):
        folder = root / mount / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / most).write_text(f"{limits.get(group, 2**63 - 4096 if mount == V1 else 'max')}\n")
        (folder / now).write_text(f"{3 * GIB}\n")
        is_ours, num_full = group == "jobs/7/step", full.count(group)
        rows = [f"inactive_file {GIB}"]
        if mount == V1:
            rows = [f"inactive_file {GIB * is_ours}", f"total_inactive_file {GIB}"]
            (folder / "memory.memsw.failcnt").write_text(f"{num_full}\n")
        (folder / "memory.stat").write_text("\n".join(["anon 5", *rows]) + "\n")
        (folder / events).write_text(f"under_oom 0\noom {num_full}\noom_kill {kills * is_ours}\n")
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
    assert num_memory_kills(tmp_path) == 2 and kills.sentence() == "", "they were before"
    machine(tmp_path, mount, {"jobs/7": 8 * GIB, "jobs": 64 * GIB}, kills=3, full=("jobs/7",))
    said = kills.sentence()
    assert "has killed a process of this run or of its control group, because" in said
    assert f"its control group was full (limit 8.0 GiB, {tmp_path / mount / 'jobs/7'})" in said
    assert "raise the limit" in said and "fusionrl plan" in said
    machine(tmp_path, mount, {}, kills=5)
    assert "3 processes" in kills.sentence() and "the machine's memory was full" in kills.sentence()


@pytest.mark.parametrize("mount", [V1, V2])
def test_a_group_is_blamed_where_its_limit_was_reached(mount: str, tmp_path: Path) -> None:
    """The kernel counts a kill in the group of the process, also where the machine had no memory left."""
    limits, before = {"jobs/7": 8 * GIB, "jobs": 64 * GIB}, ("jobs/7", "jobs/7")
    kills = MemoryKills(machine(tmp_path, mount, limits, full=before))
    machine(tmp_path, mount, limits, kills=1, full=before)
    place = tmp_path / mount
    assert f"of its control group (limit 8.0 GiB, {place / 'jobs/7'}) or of the machine was full" in kills.sentence()
    machine(tmp_path, mount, limits, kills=1, full=(*before, "jobs"))
    assert f"its control group was full (limit 64.0 GiB, {place / 'jobs'})" in kills.sentence(), (
        "the wider one was full"
    )


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("memory.failcnt", 0, 2), ("memory.max_usage_in_bytes", 3 * GIB, 8 * GIB)],
)
def test_signs_of_a_limit_that_was_reached_in_version_1(name: str, before: int, after: int, tmp_path: Path) -> None:
    """There is no count of it alone, and new kernels leave the one of failures at 0."""
    limits = {"jobs/7": 8 * GIB}
    file = machine(tmp_path, V1, limits) / V1 / "jobs/7" / name
    for value, is_sure in ((before, True), (after, False)):
        file.write_text(f"{value}\n")
        machine(tmp_path, V1, limits)
        kills = MemoryKills(tmp_path)
        machine(tmp_path, V1, limits, kills=1)
        file.write_text(f"{after}\n")
        assert ("or of the machine" not in kills.sentence()) == is_sure, "else it was so before"


def test_programs_of_the_sandbox_do_not_count(tmp_path: Path) -> None:
    """They have groups of their own below this process's."""
    kills = MemoryKills(machine(tmp_path, V2, {}))
    (tmp_path / V2 / "jobs/7/step/memory.events").write_text("oom_kill 9\n")  # with those below
    assert kills.sentence() == ""
