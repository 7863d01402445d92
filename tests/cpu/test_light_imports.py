"""A server on a CPU imports neither torch's compiler nor SymPy; a trainer is in `test_megatron_patches.py`."""

import importlib.util
from pathlib import Path

import pytest

from fusionrl.runtime.early_start import engine_branch
from tests.own_process import run_code

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


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_a_server_without_what_it_never_uses(tiny_model: Path, tmp_path: Path) -> None:
    run_code(_SERVER, **engine_branch(str(tiny_model), tmp_path).environment | {"CUDA_VISIBLE_DEVICES": ""})
