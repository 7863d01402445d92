"""The shims of CUDA in a trainer without it leave the rest of torch as it was. A process of its own for all
of it, as the shims are for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Megatron is imported before the shims, as in the nursery: not every fork of it is a trainer. No module has a name of
# its own for what is replaced.
IMPORTS = """
import sys, torch
from fusionrl.cpu import megatron_patches
names = [(torch, name) for name in megatron_patches._FACTORIES]
names += [(torch.cuda, name) for name in ('current_device', 'set_device', 'synchronize', 'Stream', 'Event',
    'current_stream', 'default_stream', 'stream', 'get_rng_state', 'set_rng_state', 'manual_seed')]
names += [(torch.Tensor, name) for name in ('cuda', 'pin_memory', 'record_stream', 'to', 'type')]
usual = {(at, name): getattr(at, name) for at, name in names}
import fusionrl.cpu.early_imports
absent = {'torch._dynamo', 'torch._inductor', 'sympy', 'torch.fx.experimental.symbolic_shapes'} & set(sys.modules)
assert not absent, absent
assert 'megatron.core' in sys.modules
assert all(getattr(at, name) is it for (at, name), it in usual.items())
holders = [(module, name) for module, found in list(sys.modules.items())
    if module.startswith(('megatron', 'fusionrl')) for name, value in vars(found).items()
    if any(value is it for it in usual.values())]
assert not holders, holders
assert megatron_patches.install()
assert all(getattr(at, name) is not it for (at, name), it in usual.items())
megatron_patches.patch()
from megatron.core import utils
from megatron.core.jit import jit_fuser
assert jit_fuser(len) is len and utils.HAVE_DTENSOR
# Transformer Engine's optimizer and norms are kernels; it is installed and cannot work.
import megatron.core.optimizer as optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from fusionrl.trainer import megatron_core
megatron_core.without_te()
assert clip_grads.l2_norm_impl is local_multi_tensor_l2_norm
assert optimizer.Adam is megatron_core.FusedAdam
"""
# transformers builds models so.
DEVICES = """
with torch.device('meta'):
    made = [torch.ones(2), torch.arange(3), torch.empty(1), torch.zeros(1), torch.full((1,), 2.0)]
assert {one.device.type for one in made} == {'meta'}, made
assert torch.ones(1, device='cuda').device.type == 'cpu'
"""
# An optimizer leaves torch's compiler out until a program uses it.
OPTIMIZER = """
class Steepest(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]['params']:
            param -= param.grad
def train():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Steepest([weight])
    weight.sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    return weight.tolist()
alone = train()
assert alone[0] < 1 and 'torch._dynamo' not in sys.modules
import torch._dynamo
function = torch.optim.Optimizer.zero_grad.__wrapped__
assert not hasattr(getattr(function, '__dynamo_disable'), '_torchdynamo_disable')
assert train() == alone
assert getattr(function, '__dynamo_disable')._torchdynamo_disable
from torch.fx.experimental import symbolic_shapes
from torch.distributed.tensor import _decompositions
assert _decompositions.GuardOnDataDependentSymNode is symbolic_shapes.GuardOnDataDependentSymNode
"""
# Megatron's linear layers add gradients of weights by `add_gradient`.
GRADIENTS = """
from megatron.core.tensor_parallel import layers
def train(fuses):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(5, 3))
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(5, 3), False
    inputs = torch.randn(7, 1, 3, requires_grad=True)
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication.apply
    linear(inputs, weight, None, fuses, False, False, None, 0, None).pow(2).sum().backward()
    if not weight.grad_added_to_main_grad:
        weight.main_grad += weight.grad
    return weight.main_grad, inputs.grad, weight.grad_added_to_main_grad
(ours, of_inputs, added), (plain, expected, not_added) = train(True), train(False)
assert added and not not_added
torch.testing.assert_close(ours, plain)
assert torch.equal(of_inputs, expected)
"""
# A GPU attends in bf16, a CPU in fp32; "meta" is a device that is not a CPU.
ATTENTION = """
from types import SimpleNamespace
import torch.nn.functional as F
from fusionrl.trainer.local_attention import SDPACoreAttention
seen, usual = [], F.scaled_dot_product_attention
def note(query, *rest, **values):
    seen.append(query.dtype)
    return usual(query, *rest, **values)
F.scaled_dot_product_attention = note
module = SimpleNamespace(dropout=0.0, training=False, scale=None, config=None, softmax_offset=None)
module._attend = lambda *parts: SDPACoreAttention._attend(module, *parts)
for device in ("cpu", "meta"):
    tensor = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16, device=device)
    assert module._attend(tensor, tensor, tensor, None).dtype is torch.bfloat16
assert seen == [torch.float32, torch.bfloat16], seen
"""
PARTS = {"devices": DEVICES, "optimizer": OPTIMIZER, "gradients": GRADIENTS, "attention": ATTENTION}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What goes wrong in each part, each in a fork; and in the imports."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    code = IMPORTS + (
        "import os, traceback\n"
        f"for name, code in {PARTS!r}.items():\n"
        "    if os.fork() == 0:\n"
        "        try:\n"
        "            exec(code, globals())\n"
        "        except BaseException:\n"
        "            print(f'== {name}', traceback.format_exc(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    parts = dict(text.split(" ", 1) for text in done.stdout.split("== ")[1:])
    return parts | ({"imports": done.stderr} if done.returncode else {})


@pytest.mark.parametrize("part", ["imports", *PARTS])
def test_a_trainer_without_cuda(part: str, failures: dict[str, str]) -> None:
    assert part not in failures, failures[part]
