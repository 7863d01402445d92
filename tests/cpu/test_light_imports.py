"""A server and a trainer on a CPU import neither torch's compiler nor SymPy, and work as with them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusionrl.runtime.nursery_order import engine_branch

_ABSENT = """
import sys
absent = ("torch._dynamo", "torch._inductor", "sympy", "torch.fx.experimental.symbolic_shapes")
absent += ("sglang.srt.models.qwen3_moe", "sglang.srt.models.qwen3_asr")
found = [name for name in absent if name in sys.modules]
assert not found, found
"""
_SERVER = f"""
import fusionrl.engines.server_imports
{_ABSENT}
registry = sys.modules["sglang.srt.models.registry"]
served = {{name for name in registry.ModelRegistry.models if not name.startswith("Transformers")}}
assert served == {{"Qwen3ForCausalLM"}}, served
import torch
from torch.distributed.tensor import _collective_utils
assert _collective_utils.guard_or_false(True) and not _collective_utils.guard_or_false(False)
from torch.fx.experimental import symbolic_shapes
assert _collective_utils.guard_or_false is symbolic_shapes.guard_or_false
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.transcription_adapters import qwen3_asr as adapter
from sglang.srt.multimodal.processors import qwen3_asr as processor
assert adapter.DEFAULT_ASR_PROMPT == processor.DEFAULT_ASR_PROMPT != ""
message = {{"role": "user", "content": "12"}}
request = protocol.ChatCompletionRequest(model="m", messages=[message], tools=None, max_tokens=3)
assert request.messages[0].content == "12" and request.model_dump()["max_tokens"] == 3
try:
    protocol.ChatCompletionRequest(model="m", messages=[{{"role": "user"}}], max_tokens="many")
except ValueError as error:
    assert "max_tokens" in str(error)
else:
    raise AssertionError("a message is checked")
from pydantic import BaseModel
assert "defer_build" not in BaseModel.model_config
function = lambda: 1
assert torch.compile(function) is function, "the engine's environment says so"
assert torch.compile.__module__ == "torch" and torch.compiler.disable.__module__ == "torch.compiler"
import torch._dynamo
assert torch._dynamo.config is not None and torch._dynamo is sys.modules["torch._dynamo"]
from transformers import masking_utils
with masking_utils.TransformGetItemToIndex():
    pass
"""
_TRAINER = f"""
import fusionrl.cpu.early_imports
{_ABSENT}
from megatron.core import utils
assert utils.HAVE_DTENSOR
from torch.fx.experimental import symbolic_shapes
from torch.distributed.tensor import _decompositions
assert _decompositions.GuardOnDataDependentSymNode is symbolic_shapes.GuardOnDataDependentSymNode
"""


def _run(code: str, environment: dict[str, str]) -> None:
    env = {**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_a_server_without_what_it_never_uses(tiny_model: Path, tmp_path: Path) -> None:
    _run(_SERVER, engine_branch(str(tiny_model), tmp_path).environment)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_a_trainer_without_what_it_never_uses() -> None:
    _run(_TRAINER, {})
