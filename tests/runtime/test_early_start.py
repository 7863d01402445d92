"""What begins before the flags are checked: what the mode needs, under the guard, until it is closed."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.base.nursery_client import FOLDER_VARIABLE
from fusionrl.cli import train
from fusionrl.config.config import Config
from fusionrl.runtime import early_start as early_start_module
from fusionrl.runtime.early_start import CLUSTER_TOKEN, EARLY_LINE, EarlyStart, make_order, make_private_folder
from fusionrl.runtime.guard import TOKEN_VARIABLE
from tests.own_process import assert_runs, carriers, wait_until


@pytest.mark.parametrize(
    ("values", "branches"),
    [
        ({"mode": "rl"}, ["engine", "worker"]),
        ({"mode": "eval"}, ["engine", "worker"]),
        ({"mode": "sft"}, ["worker"]),
        ({"mode": "rl", "debug_train_only": True}, ["worker"]),
        ({"mode": "rl", "debug_rollout_only": True}, ["engine", "worker"]),
    ],
)
def test_what_a_mode_needs(tiny_model: Path, tmp_path: Path, values: dict[str, object], branches: list[str]) -> None:
    assert "torch" in json.loads(EARLY_LINE), "its import is most of a branch's start"
    order = make_order(Config.from_flat({"hf_checkpoint": str(tiny_model), **values}), tmp_path, "key")
    assert order.key == "key"
    assert [Path(branch.path).name for branch in order.branches] == branches
    modules = order.branches[-1].modules
    has_trainers = values["mode"] != "eval" and not values.get("debug_rollout_only")
    assert ("fusionrl.cpu.early_imports" in modules) == has_trainers
    if "engine" in branches:
        environment = order.branches[0].environment
        assert environment["FUSIONRL_DEVICE"] == "cpu" and environment["HF_HUB_OFFLINE"] == "1"
        assert "qwen3" not in environment["SGLANG_DISABLED_MODEL_ARCHS"].split(",")


RUN = ["--mode", "sft", "--device", "cpu"]


def test_all_of_it_begins_before_the_flags_are_read_and_ends_with_it() -> None:
    """The nursery, which gets the order later, carries the run's mark, and no token."""
    with EarlyStart() as early_start:
        early_start.prepare(RUN)
        folder, nursery, token = early_start.folder, early_start._nursery, os.environ[TOKEN_VARIABLE]
        assert folder is not None and nursery is not None and not (folder / "worker").exists()
        assert folder.stat().st_mode & 0o777 == 0o700
        for _ in range(2):  # it begins once
            early_start.begin(Config.from_flat({"mode": "sft"}), "cpu")
            assert early_start._nursery is nursery and early_start.folder == folder
        assert early_start.environment() == {FOLDER_VARIABLE: str(folder)}
        wait_until((folder / "worker").exists, 60.0)
        found = carriers(token)  # it forks its branches meanwhile
        assert nursery.pid in found
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended: it was forked to see whether that goes
                assert CLUSTER_TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert nursery.returncode == -9 and not folder.exists() and not carriers(token)
    early_start.close()


def test_nothing_begins_for_a_command_without_a_nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files show that a machine has a GPU."""
    monkeypatch.setattr(early_start_module, "_GPU_FILES", (str(tmp_path),))
    with EarlyStart() as early_start:
        for flag in ("--help", "--dry-run", "--in-process", "--ray-address=10.0.0.1:6379"):
            early_start.prepare([*RUN, flag])
        early_start.prepare(["--mode", "sft"])
        assert early_start.folder is None
        early_start.prepare(RUN)
        assert early_start.folder is not None, "the user wants the CPU"


@pytest.mark.parametrize(
    ("values", "is_prepared"),
    [({"ray_address": "10.0.0.1:6379"}, True), ({}, True), ({}, False), ({"hf_checkpoint": "broken"}, True)],
    ids=["a joined cluster", "a GPU", "a GPU from the start", "a checkpoint that the checks refuse"],
)
def test_a_run_that_needs_no_nursery_has_none(values: dict[str, str], is_prepared: bool, tmp_path: Path) -> None:
    """Also where the flags looked like those of one that does. It has a folder and a guard."""
    (tmp_path / "config.json").write_text('{"architectures": 3')
    values = {name: str(tmp_path) if value == "broken" else value for name, value in values.items()}
    with EarlyStart() as early_start:
        if is_prepared:
            early_start.prepare(RUN)
        nursery = early_start._nursery
        early_start.begin(Config.from_flat({"mode": "eval", **values}), "cpu" if values else "cuda")
        assert early_start.environment() == {} and early_start._guard is not None
        assert (nursery is not None) == is_prepared and (nursery is None or nursery.returncode is not None)
        folder = early_start.folder
        assert folder is not None and folder.is_dir() and (folder / "nursery.log").exists() == is_prepared
    assert not folder.exists()


_fails = Mock(side_effect=OSError(errno.EAGAIN, "no process is left"))


def test_what_fails_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher begins again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(early_start_module, "_MAX_TMPDIR_BYTES", 1000)
    with EarlyStart() as early_start:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", _fails)
            with pytest.raises(OSError, match="no process is left"):
                early_start.begin(Config.from_flat({"mode": "sft"}), "cuda")
        assert early_start.folder is None and not list(tmp_path.iterdir())
        early_start.begin(Config.from_flat({"mode": "sft"}), "cuda")
        assert early_start.folder is not None


def test_without_a_nursery_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is there; the nursery cannot be started. A command also continues where no folder can be made."""
    usual = subprocess.Popen

    def start(command: Sequence[str], **options: Any) -> Any:
        return _fails() if "fusionrl.base.nursery" in command else usual(command, **options)

    monkeypatch.setattr(early_start_module.subprocess, "Popen", start)
    with EarlyStart() as early_start:
        early_start.begin(Config.from_flat({"mode": "sft"}), "cpu")
        assert early_start.folder is not None and early_start.environment() == {}
    monkeypatch.setattr(early_start_module, "make_private_folder", _fails)
    with EarlyStart() as early_start:
        train._begin(early_start, RUN)
        assert early_start.folder is None


@pytest.mark.parametrize(
    ("variable", "name", "reason"),
    [
        ("RAY_TMPDIR", "short", ""),
        ("RAY_TMPDIR", "with-a-long-name", "at most 24 characters"),
        ("TMPDIR", "a b", "ASCII without white space"),
    ],
)
def test_a_folder_where_ray_has_no_sockets_is_not_used_and_the_log_says_why(
    variable: str, name: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parent = Path(tempfile.mkdtemp(dir="/tmp", prefix="t"), name)
    parent.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(parent))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is found once
    folder = make_private_folder()
    try:
        assert folder.parent == (Path("/tmp") if reason else parent)
        assert (f"{variable}={parent} is not used" in caplog.text) == bool(reason) and reason in caplog.text
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in (folder, folder / "ray", folder / "stores"))
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(parent.parent)


# ------------------------------------------ what each process of a run imports before it does anything
NURSERY = "fusionrl.runtime.actor_process, fusionrl.runtime.worker_actors, fusionrl.runtime.worker_imports"
LATE = "torch transformers megatron sglang matplotlib"


@pytest.mark.parametrize(
    "stages",
    [
        {
            # A command begins before it imports what reads its flags: a third of a second, in which the nursery has
            # torch.
            "fusionrl.cli.train": "numpy pydantic fusionrl.config fusionrl.plan fusionrl.engines",
            "fusionrl.runtime.run": f"{LATE} aiohttp",
            "fusionrl.runtime.worker_actors": LATE,
        },
        {
            # An engine's actor needs nothing of Buffer and trainers.
            "fusionrl.runtime.actor_process": "fusionrl.buffer fusionrl.trainer fusionrl.config aiohttp",
            # Ray reads the number of the job when it is loaded, and the nursery has none yet: no worker would start.
            # Who sends engines nothing needs no client of theirs.
            f"{NURSERY}, fusionrl.runtime.worker_imports": "ray aiohttp",
        },
    ],
    ids=["a driver", "an engine"],
)
def test_what_a_process_leaves_out(stages: dict[str, str]) -> None:
    """One process takes the stages in turn."""
    code = "import sys\n"
    for modules, absent in stages.items():
        code += f"import {modules}\nfound = set({absent.split()}) & set(sys.modules)\nassert not found, found\n"
    assert_runs(code)


def test_ray_needs_what_is_imported_before_it() -> None:
    """A package that Ray no longer imports is imported for nothing."""
    code = (
        "import sys, ray, ray.actor, ray._private.node, ray._private.async_compat\n"
        "import ray._private.runtime_env.setup_hook\n"
        "found = set(sys.modules)\n"
        "from fusionrl.runtime.worker_imports import NEEDS\n"
        "assert not set(NEEDS) - found, set(NEEDS) - found\n"
    )
    assert_runs(code)


def test_ray_has_the_processes_that_are_left_out() -> None:
    """A version of Ray that calls them otherwise would start all of them, in silence."""
    from ray._private.node import Node

    from fusionrl.runtime.ray_cluster import _UNUSED, only_what_is_used

    usual = {name: getattr(Node, name) for name in _UNUSED}
    with only_what_is_used(dashboard=False):
        assert all(getattr(Node, name) is not usual[name] for name in _UNUSED)
    with only_what_is_used(dashboard=True):
        assert all(getattr(Node, name) is usual[name] for name in _UNUSED)
    assert all(getattr(Node, name) is usual[name] for name in _UNUSED)


@pytest.mark.parametrize(
    ("text", "expected"), [("3", 3), ("4,2", 4), ("", None), ("many", None), ("0", None), (" 08", 8)]
)
def test_threads_of_a_fork(text: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenMP takes for no number changes nothing, and ends no worker."""
    import torch

    from fusionrl.runtime.worker_fork import _limit_threads

    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    _limit_threads(text)
    assert found == ([] if expected is None else [expected])


def test_a_fork_has_the_threads_that_ray_gives_to_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets the variable before the task is called, which would import torch: here it is imported before."""
    import ray._private.utils
    import torch

    from fusionrl.runtime.worker_fork import _RAY_S_LIMIT, _follow_ray_s_limit

    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    answers = [True, False]  # whether Ray sets it: not where the user has
    monkeypatch.setattr(ray._private.utils, _RAY_S_LIMIT, lambda: answers.pop(0))
    _follow_ray_s_limit()
    assert [getattr(ray._private.utils, _RAY_S_LIMIT)() for _ in range(2)] == [True, False] and found == [3]
