"""The beginning of a run, before its flags are checked: its private folder, its guard, and a nursery of its processes.

On a CPU most of a start is imports. They begin before the flags are read, on a core that the checks leave idle, and are
made once for all processes of a kind (`fusionrl.base.nursery`): torch at once, the rest when the mode is known. So this
module imports little, and what reads flags or checks them is imported later.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fusionrl.base.environment import MKL_MODE, child_environment
from fusionrl.base.nursery_client import FOLDER_VARIABLE, PID_FILE, WORKER_SOCKET
from fusionrl.base.process import ROOM
from fusionrl.base.sockets import LOOPBACK, socket_folder
from fusionrl.runtime.guard import Guard

if TYPE_CHECKING:
    from fusionrl.base.nursery import Branch, Order
    from fusionrl.config.config import Config

logger = logging.getLogger(__name__)

CLUSTER_TOKEN = secrets.token_hex(32)
"""Of the local cluster that this process starts, and of its nursery. Ray reads it once a process."""
EARLY_LINE = b'["torch"]\n'
"""The first input of a nursery: modules that each of its branches needs."""
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
_NO_NURSERY = ("-h", "--help", "--dry-run", "--in-process", "--ray-address")
"""Flags of commands that have none."""
_ACTORS = ("fusionrl.runtime.actor_process", "fusionrl.runtime.worker_actors")
_MAX_TMPDIR_BYTES = 24  # of the 107 of a socket's path


class EarlyStart:
    """A context manager: leaving it ends the guard and the nursery and removes the folder."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._guard: Guard | None = None
        self._nursery: subprocess.Popen[bytes] | None = None
        self._has_begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, argv: Sequence[str]) -> None:
        """Start before the flags are parsed if they look like a CPU run; `begin` corrects a wrong guess. Raises
        OSError, as `begin`."""
        words = {part for word in argv for part in word.split("=")}
        has_gpu = any(os.path.exists(path) for path in _GPU_FILES) and not words & {"cpu"}
        if not has_gpu and words.isdisjoint(_NO_NURSERY):
            self._make_folder()
            self._start_nursery()

    def begin(self, config: Config, device: str) -> None:
        """Start whatever `prepare` did not; idempotent. A nursery needs a CPU run with its own cluster. Raises OSError
        if no folder or process can be made; nothing is started."""
        if self._has_begun:
            return
        self._make_folder()
        self._has_begun = True
        if device == "cpu" and config.cluster.ray_address is None and not config.run.in_process:
            self._order(config)
        else:
            self._end_nursery()

    def _make_folder(self) -> None:
        if self.folder is not None:
            return
        folder = make_private_folder()
        try:
            self._guard = Guard(folder, child_environment("guard"))  # before any process that it is to guard
        except BaseException:  # an interruption, too, leaves no folder behind
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.folder = folder

    def _start_nursery(self) -> None:
        assert self.folder is not None
        try:
            self._nursery = start_nursery(self.folder, EARLY_LINE)
        except OSError as error:  # without a nursery each process starts by itself
            logger.debug("the nursery does not start: %s", error)

    def _order(self, config: Config) -> None:
        assert self.folder is not None
        try:
            order = make_order(config, self.folder, CLUSTER_TOKEN)
        except (OSError, ValueError, TypeError, AttributeError) as error:  # a config.json that the checks refuse
            logger.debug("no nursery: %s", error)
            self._end_nursery()
            return
        if self._nursery is None:
            self._start_nursery()
        if self._nursery is not None:
            try:
                _tell(self._nursery, order.to_line())
            except OSError as error:
                logger.debug("the nursery is dead: %s", error)

    def environment(self) -> dict[str, str]:
        """Return the variables by which the run's processes find the nursery."""
        return {} if self._nursery is None else {FOLDER_VARIABLE: str(self.folder)}

    def close(self) -> None:
        """End the nursery and all remaining processes of the run. Idempotent."""
        self._end_nursery()
        if self._guard is not None:
            self._guard.close()  # it removes the folder
            self._guard, self.folder = None, None

    def _end_nursery(self) -> None:
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
            assert self._nursery.stdin is not None
            self._nursery.stdin.close()
            self._nursery = None


def nursery_environment() -> dict[str, str]:
    """Return the environment of a nursery that this process starts."""
    paths = [str(Path(__file__).resolve().parents[2]), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    env = child_environment("guard") | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env.setdefault(*MKL_MODE)  # MKL may read it before a fork is a trainer
    env["CUDA_VISIBLE_DEVICES"] = ""  # looking for a GPU before a fork breaks it in the fork
    # Libraries that start a thread a core and never change that; torch gets each fork's own number.
    return env | {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if not env.get(name)}


def start_nursery(folder: Path, line: bytes) -> subprocess.Popen[bytes]:
    """Start a nursery with its first line. Its log is in `folder`; it ends with this process. Raises OSError if it
    cannot be started, or is dead."""
    with open(folder / "nursery.log", "wb") as log:
        nursery = subprocess.Popen(
            [sys.executable, "-m", "fusionrl.base.nursery", " " * ROOM],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=nursery_environment(),
            start_new_session=True,
        )
    try:
        (folder / PID_FILE).write_text(str(nursery.pid), encoding="ascii")
        _tell(nursery, line)
    except OSError:
        nursery.kill()
        nursery.wait()
        raise
    return nursery


def _tell(nursery: subprocess.Popen[bytes], line: bytes) -> None:
    assert nursery.stdin is not None
    nursery.stdin.write(line)
    nursery.stdin.flush()


def make_private_folder() -> Path:
    """A new folder that this user alone can read, by a path that is short enough for Ray's sockets (107 characters)."""
    parent = socket_folder(_MAX_TMPDIR_BYTES, "Ray's files are", "RAY_TMPDIR")
    folder = Path(tempfile.mkdtemp(prefix="fusionrl-", dir=parent))
    for name in ("ray", "stores"):
        (folder / name).mkdir(mode=0o700)
    return folder


# What the nursery imports and forks. These functions import what reads flags.
def make_order(config: Config, folder: Path, key: str) -> Order:
    """Order what the nursery of a run is to import and to fork. `key`: of those who may ask for a fork."""
    from fusionrl.base.nursery import Branch, Order
    from fusionrl.config.eval_sets import sees_images
    from fusionrl.config.run_parts import uses_engines, uses_trainers

    branches = []
    if uses_engines(config) and config.model.hf_checkpoint is not None:
        branches.append(engine_branch(config.model.hf_checkpoint, folder, sees=sees_images(config)))
    megatron = ["fusionrl.cpu.early_imports"] if uses_trainers(config) else []
    client = ["aiohttp"] if uses_engines(config) else []  # of engines; imported by their first request elsewhere
    worker = Branch(
        str(folder / WORKER_SOCKET),
        [*_ACTORS, *megatron, *client, "fusionrl.runtime.worker_imports"],
        "fusionrl.runtime.worker_fork:main",  # with it Ray, which keeps its variables
        late=["RAY_JOB_ID", "RAY_RAYLET_PID"],
    )
    return Order(key, [*branches, worker])


def engine_branch(model_path: str, folder: Path, *, sees: bool = False) -> Branch:
    """Of the policy's engines; `sees`: they are asked about images.

    An engine of another model imports other files of SGLang, and is started in the usual way.
    """
    from fusionrl.base.nursery import Branch
    from fusionrl.engines.images import CACHE_VARIABLE, KEEP_IDS_VARIABLE, ImageSettings
    from fusionrl.engines.process import NURSERY_SOCKET
    from fusionrl.engines.spec import EngineSpec, server_environment

    spec = EngineSpec(
        index=0,
        model_path=model_path,
        device="cpu",
        dtype="float32",
        tp_size=1,
        gpu_ids=(),
        host=LOOPBACK,
        api_key=None,
        log_dir="",
        seed=0,
        images=ImageSettings(trains_tower=True) if sees else None,
    )
    environment = {name: value for name, value in server_environment(spec).items() if os.environ.get(name) != value}
    environment.pop("PYTHONPATH", None)
    return Branch(
        str(folder / NURSERY_SOCKET),
        ["fusionrl.engines.server_imports"],
        "fusionrl.engines.process:mind_server",
        environment,
        kept=["SGLANG_", "HF_", "TRANSFORMERS_", "TORCHDYNAMO_", "THP_"],
        # Each rank reads the first when it begins, and servers the others.
        free=["SGLANG_CPU_OMP_THREADS_BIND", CACHE_VARIABLE, KEEP_IDS_VARIABLE],
    )
