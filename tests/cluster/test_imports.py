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
