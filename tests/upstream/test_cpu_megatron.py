"""What stands in for CUDA in a trainer without it must leave the rest of torch as it was."""

from __future__ import annotations

import subprocess
import sys


def test_a_device_as_a_context_works_after_it() -> None:
    """transformers builds models so; a process of its own, as the shims are for good."""
    code = (
        "import torch\n"
        "from fusionrl.upstream import cpu_megatron\n"
        "assert cpu_megatron.install()\n"
        "with torch.device('meta'):\n"
        "    made = [torch.ones(2), torch.arange(3), torch.empty(1), torch.zeros(1), torch.full((1,), 2.0)]\n"
        "assert {one.device.type for one in made} == {'meta'}, made\n"
        "assert torch.ones(1, device='cuda').device.type == 'cpu'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
