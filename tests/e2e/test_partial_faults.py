"""Faults of a machine, one after the other within one run: each is one message with a cure, and costs nothing trained.

What each fault is, and what its user sees: docs/guides/trouble.md.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from fusionrl.sandbox.limits import MemoryCgroup, writable_parent
from tests.e2e.launch import Launched, launch, metrics_of, run, train_steps, trained_prompts

pytestmark = pytest.mark.e2e

HOOKS = "tests/e2e/fault_hooks.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def flags(rl_flags: list[str]) -> list[str]:
    """A run of two steps that is saved after each."""
    changed = [
        f"{HOOKS}:reward" if before == "--custom-rm-path" else flag for before, flag in pairwise(["", *rl_flags])
    ]
    return [*changed, "--num-rollout", "2", "--resume", "--save-interval", "1"]


def _message(text: str) -> str:
    message = text[text.index("failed: ") :]
    assert "to continue: fusionrl train" in message and message.rstrip().splitlines()[-1].startswith("logs: "), message
    return message


def _check_end(folder: Path) -> None:
    """Both steps are trained, of every prompt once."""
    assert {step for _, step in train_steps(folder)} == {1, 2}
    prompts = trained_prompts(folder)
    assert len(prompts) == len(set(prompts)) == 16


def _limit(process: int, kind: int, limit: int) -> None:
    resource.prlimit(process, kind, (limit, limit))


def _no_more_files(launched: Launched, held: Path) -> None:
    (buffer,) = launched.find("^ray::Buffer")
    _limit(buffer, resource.RLIMIT_NOFILE, 3)
    held.unlink()


def _no_memory_for_a_rank(launched: Launched, held: Path) -> None:
    rank = launched.find("^ray::PolicyWorker")[-1]
    _limit(rank, resource.RLIMIT_AS, psutil.Process(rank).memory_info().vms + 2**24)
    held.unlink()


def _no_memory_for_the_buffer(launched: Launched, held: Path) -> None:
    """Let the kernel kill it: what it takes from now on has to fit into a quarter of a megabyte."""
    parent, (buffer,) = writable_parent(), launched.find("^ray::Buffer")
    if parent is None:  # this user may make no control groups here
        os.kill(buffer, signal.SIGKILL)
        held.unlink()
        return
    group = MemoryCgroup(parent, 256 << 10)
    try:
        assert group.add(buffer)
        held.unlink()
        launched.wait_for(lambda: not psutil.pid_exists(buffer))
        assert group.was_full()
    finally:
        group.remove()


# Fault → what the test does in the middle of the second rollout (None: a hook does it) and parts of the last message.
FAULTS: dict[str, tuple[Callable[[Launched, Path], None] | None, list[str]]] = {
    "a flipped bit": (None, ["ReplicaMismatch", "trainer rank 0 on", "trainer rank 1 on", "computes wrongly"]),
    "wrong version": (None, ["meta_info.weight_version is 'default', and version 1 was pushed", "/generate"]),
    "no more files": (_no_more_files, ["Too many open files", "ulimit -Hn"]),
    "no more memory of a rank": (_no_memory_for_a_rank, ["trainer rank", "memory"]),
    "no more memory of a reward": (None, [f"--custom-rm-path {HOOKS}:reward", "MemoryError", "memory is full"]),
}


def test_faults_of_processes(flags: list[str], tmp_path: Path) -> None:
    """Each ends the second step of its attempt, but the last: a Buffer that the kernel kills comes back."""
    folder, fault, held = tmp_path / "run", tmp_path / "fault", tmp_path / "held"
    flags += ["--run-dir", str(folder), "--actor-num-gpus-per-node", "2"]
    flags += ["--custom-megatron-before-train-step-hook-path", f"{HOOKS}:before_step"]
    flags += ["--check-weight-hash-across-dp-replicas-interval", "1"]
    for name, (make, parts) in FAULTS.items():
        fault.write_text("hold" if make else name)
        more = ["--custom-generate-function-path", f"{HOOKS}:generate"] if name == "wrong version" else []
        with launch([*flags, *more], tmp_path, FUSIONRL_TEST_FILE=str(fault)) as launched:
            if make is not None:
                launched.wait_for(held.exists)
                make(launched, held)
            assert launched.wait() == 1, (name, launched.output()[-3000:])
        message = _message(launched.output())
        assert not fault.exists(), name
        for part in parts:
            assert part in message, (name, part, message)
    fault.write_text("hold")
    with launch(flags, tmp_path, FUSIONRL_TEST_FILE=str(fault)) as launched:
        launched.wait_for(held.exists)
        _no_memory_for_the_buffer(launched, held)
        assert launched.wait() == 0, launched.output()[-3000:]
    _check_end(folder)
    assert metrics_of(folder)[-1]["run/restarts_buffer"] == 1


class Machine:
    """A run with a disk and a /dev/shm of its own, in a mount namespace."""

    def __init__(self, flags: list[str], folder: Path) -> None:
        self._flags, self.folder, self.fault = flags, folder, folder / "fault"
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sleep", "1000"], start_new_session=True
        )

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "--target", str(self._keeper.pid), "--mount", f"--wd={ROOT}", *words]

    def shell(self, text: str) -> None:
        subprocess.run(self.command("bash", "-c", text), check=True, capture_output=True)

    def attempt(self, name: str, harm: str, mend: str, code: int) -> str:
        """Run; `harm` the machine in the middle of the second rollout, and `mend` it after the end."""
        self.fault.write_text("hold" if harm else "")
        output = self.folder / f"output-{name.replace(' ', '-')}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                self.command(sys.executable, "-m", "fusionrl.cli", "train", *self._flags),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "FUSIONRL_TEST_FILE": str(self.fault), "OMP_NUM_THREADS": "1"},
            )
            if harm:
                held = self.folder / "held"
                deadline = time.monotonic() + 400
                while not held.exists():
                    assert process.poll() is None and time.monotonic() < deadline, output.read_text()[-3000:]
                    time.sleep(0.1)
                self.shell(harm)
                held.unlink()
            found = process.wait(400)
        self.shell(mend or "true")
        assert found == code, output.read_text()[-3000:]
        return output.read_text()

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()


@pytest.mark.cold
def test_faults_of_the_disk_and_of_shared_memory(flags: list[str], tmp_path: Path) -> None:
    """A full disk, one that is read-only, a /dev/shm that another program fills: each is mended before the resume."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no mount namespaces")
    disk = tmp_path / "disk"
    disk.mkdir()
    machine = Machine([*flags, "--run-dir", str(disk / "run")], tmp_path)
    try:
        time.sleep(0.2)
        machine.shell(f"mount -t tmpfs -o size=400m tmpfs {disk} && mount -t tmpfs -o size=400m tmpfs /dev/shm")
        full = machine.attempt("full", f"cat /dev/zero > {disk}/filler || true", f"rm {disk}/filler", 1)
        assert "No space left on device" in full and "a disk is full" in full and "Traceback" not in full
        rollouts = f"{disk}/run/rollouts"  # the whole disk has files that are open for writing
        lock = f"mount --bind {rollouts} {rollouts} && mount -o remount,ro,bind {rollouts}"
        locked = machine.attempt("read only", lock, f"umount {rollouts}", 1)
        assert "Read-only file system" in locked and "findmnt -T" in locked and "Traceback" not in locked
        filler = "cat /dev/zero > /dev/shm/filler || true"
        shared = machine.attempt("shm", filler, "rm /dev/shm/filler", 1)
        assert "/dev/shm of" in shared and "MiB free" in shared and "Traceback" not in shared
        machine.attempt("end", "", f"cp -r {disk}/run {tmp_path}/", 0)
    finally:
        machine.close()
    _check_end(tmp_path / "run")


@pytest.mark.cold
def test_a_clock_that_jumps_and_a_slow_disk(flags: list[str], tmp_path: Path) -> None:
    """The clock is set every two seconds, by hours; each write takes 10 ms. The run ends as usual, with usual times."""
    library, folder = tmp_path / "bad_machine.so", tmp_path / "run"
    source = Path(__file__).with_name("bad_machine.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    environment = {"LD_PRELOAD": str(library), "SLOW_FOLDER": str(folder), "SLOW_MS": "10"}
    since = time.monotonic()
    run([*flags, "--run-dir", str(folder), "--pipeline", "async-partial"], tmp_path, **environment)
    took = time.monotonic() - since
    _check_end(folder)
    for row in metrics_of(folder):
        assert abs(row["time"] - time.time()) > 1000, "the library was there"
        times = {name: value for name, value in row.items() if name.startswith("perf/time") or name.endswith("ause_s")}
        assert times and all(0 <= value < took for value in times.values()), times


# Puts batches, as the Buffer does, until neither Ray's store nor its disk has room; then frees the disk.
FULL_SPILL = """
import os, sys, time
import numpy as np, ray
from fusionrl.buffer.actor import _ray_put
from fusionrl.cli.cures import cure_of
disk = sys.argv[1]
ray.init("local", num_cpus=1, object_store_memory=80 << 20, _temp_dir=f"{disk}/ray", include_dashboard=False)
room = os.statvfs(disk)
with open(f"{disk}/filler", "wb") as file:
    file.write(bytes(room.f_bavail * room.f_frsize - (4 << 20)))
kept = []
try:
    while len(kept) < 30:
        kept.append(_ray_put(np.full(8 << 20, len(kept), np.uint8)))
except ray.exceptions.OutOfDiskError as error:
    print("cure:", cure_of(error))
os.remove(f"{disk}/filler")
until = time.monotonic() + 60
while True:
    try:
        kept.append(_ray_put(np.full(8 << 20, len(kept), np.uint8)))
        break
    except ray.exceptions.OutOfDiskError:  # Ray looks at the disk ten times a second
        assert time.monotonic() < until, "refused though the disk has room"
print("kept:", [int(ray.get(part)[-1]) for part in kept] == list(range(len(kept))), len(kept) > 5)
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder in whose path Ray's sockets have room."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.cold
def test_ray_has_no_disk_for_its_objects(short_folder: Path) -> None:
    """The next object is refused at once, with a cure; those before are kept, and there is room as the disk has."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no mount namespaces")
    mounts = 'mount -t tmpfs -o size=200m tmpfs "${@: -1}" && mount -t tmpfs -o size=300m tmpfs /dev/shm && exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "bash", "-c", mounts, "bash"]
    done = subprocess.run(
        [*words, sys.executable, "-c", FULL_SPILL, str(short_folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_raylet_start_wait_time_s": "150"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cure: \na disk is full" in done.stdout and "RAY_TMPDIR" in done.stdout and "kept: True True" in done.stdout
