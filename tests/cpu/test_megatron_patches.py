"""What stands in for CUDA in a trainer without it must leave the rest of torch as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.own_process import assert_runs


def test_a_device_as_a_context_works_after_it() -> None:
    """transformers builds models so; a process of its own, as the shims are for good."""
    code = (
        "import torch\n"
        "from fusionrl.cpu import megatron_patches\n"
        "assert megatron_patches.install()\n"
        "with torch.device('meta'):\n"
        "    made = [torch.ones(2), torch.arange(3), torch.empty(1), torch.zeros(1), torch.full((1,), 2.0)]\n"
        "assert {one.device.type for one in made} == {'meta'}, made\n"
        "assert torch.ones(1, device='cuda').device.type == 'cpu'\n"
    )
    assert_runs(code)


def test_an_optimizer_leaves_torchs_compiler_out_until_somebody_uses_it() -> None:
    code = (
        "import sys, torch\n"
        "from fusionrl.cpu import megatron_patches\n"
        "assert megatron_patches.install()\n"
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
    assert_runs(code)


def test_megatron_may_be_imported_before_the_shims_which_it_then_uses() -> None:
    """As in the nursery: not every fork of it is a trainer. No module has a name of its own for what is replaced."""
    code = (
        "import sys, torch\n"
        "from fusionrl.cpu import megatron_patches\n"
        "names = [(torch, name) for name in megatron_patches._FACTORIES]\n"
        "names += [(torch.cuda, name) for name in ('current_device', 'set_device', 'synchronize', 'Stream', 'Event',\n"
        "    'current_stream', 'default_stream', 'stream', 'get_rng_state', 'set_rng_state', 'manual_seed')]\n"
        "names += [(torch.Tensor, name) for name in ('cuda', 'pin_memory', 'record_stream', 'to', 'type')]\n"
        "usual = {(at, name): getattr(at, name) for at, name in names}\n"
        "import fusionrl.cpu.early_imports\n"
        "assert 'megatron.core' in sys.modules\n"
        "assert all(getattr(at, name) is it for (at, name), it in usual.items())\n"
        "holders = [(module, name) for module, found in list(sys.modules.items())\n"
        "    if module.startswith(('megatron', 'fusionrl')) for name, value in vars(found).items()\n"
        "    if any(value is it for it in usual.values())]\n"
        "assert not holders, holders\n"
        "assert megatron_patches.install()\n"
        "assert all(getattr(at, name) is not it for (at, name), it in usual.items())\n"
        "megatron_patches.patch()\n"
        "assert torch.ones(1, device='cuda').device.type == 'cpu'\n"
        "from megatron.core.jit import jit_fuser\n"
        "assert jit_fuser(len) is len\n"
    )
    assert_runs(code)


def test_transformer_engine_is_not_there_without_a_device(tmp_path: Path) -> None:
    """Its optimizer and norms are kernels; as in an environment for GPUs, it is installed and cannot work."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    code = (
        "from fusionrl.cpu import megatron_patches\n"
        "assert megatron_patches.install()\n"
        "import megatron.core.optimizer as optimizer\n"
        "from megatron.core.optimizer import clip_grads\n"
        "from megatron.core.utils import local_multi_tensor_l2_norm\n"
        "from fusionrl.trainer import adam\n"
        "adam.patch()\n"
        "assert clip_grads.l2_norm_impl is local_multi_tensor_l2_norm\n"
        "assert optimizer.Adam is adam.FusedAdam\n"
    )
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
