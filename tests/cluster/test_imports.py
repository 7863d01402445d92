"""What each process of a run imports before it does anything: torch takes a second of a core, and 200 MB."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["fusionrl.driver.run", "fusionrl.cluster.workers"])
def test_torch_is_left_to_the_trainers(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "found = {'torch', 'transformers', 'megatron', 'sglang', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_s_actor_imports_nothing_of_buffer_and_trainers() -> None:
    code = (
        "import sys, fusionrl.cluster.engine_worker\n"
        "found = {'fusionrl.buffer', 'fusionrl.trainer', 'fusionrl.config', 'aiohttp'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ray_has_the_processes_that_are_left_out() -> None:
    """A version of Ray that calls them otherwise would start all of them, in silence."""
    from ray._private.node import Node

    from fusionrl.cluster.ray_processes import _UNUSED, only_what_is_used

    usual = {name: getattr(Node, name) for name in _UNUSED}
    with only_what_is_used(dashboard=False):
        assert all(getattr(Node, name) is not usual[name] for name in _UNUSED)
    with only_what_is_used(dashboard=True):
        assert all(getattr(Node, name) is usual[name] for name in _UNUSED)
    assert all(getattr(Node, name) is usual[name] for name in _UNUSED)
