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


def test_an_optimizer_leaves_torchs_compiler_out_until_somebody_uses_it() -> None:
    code = (
        "import sys, torch\n"
        "from fusionrl.upstream import cpu_megatron\n"
        "assert cpu_megatron.install()\n"
        "class Steepest(torch.optim.Optimizer):\n"
        "    def __init__(self, params):\n"
        "        super().__init__(params, {})\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for param in self.param_groups[0]['params']:\n"
        "            param -= param.grad\n"
        "def train():\n"
        "    weight = torch.nn.Parameter(torch.ones(2))\n"
        "    optimizer = Steepest([weight])\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.load_state_dict(optimizer.state_dict())\n"
        "    optimizer.zero_grad()\n"
        "    return weight.tolist()\n"
        "alone = train()\n"
        "assert alone[0] < 1 and 'torch._dynamo' not in sys.modules\n"
        "import torch._dynamo\n"
        "function = torch.optim.Optimizer.zero_grad.__wrapped__\n"
        "assert not hasattr(getattr(function, '__dynamo_disable'), '_torchdynamo_disable')\n"
        "assert train() == alone\n"
        "assert getattr(function, '__dynamo_disable')._torchdynamo_disable\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
