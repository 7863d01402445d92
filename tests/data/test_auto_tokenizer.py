"""A tokenizer is read without transformers' models and torch, and everything else of transformers works as usual."""

import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from fusionrl.data import tokenizer

_LIGHT = """
import sys
from fusionrl.data.tokenizer import import_auto_tokenizer
"""
_IMPORT = """
import_auto_tokenizer()
from transformers import AutoTokenizer
from fusionrl.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
assert tokenizer.decode(tokenizer("12")["input_ids"]) == "12"
"""
_NO_MODELS = """
models = [name for name in ("torch", "torch._dynamo", "sympy", "transformers.generation.utils") if name in sys.modules]
assert not models, models
"""
_MODELS = """
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, WatermarkingConfig
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import WatermarkLogitsProcessor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.auto import auto_factory

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, is_torch_available

assert is_torch_available() and AutoConfig.from_pretrained(sys.argv[1]).dtype == torch.float32
config = AutoConfig.from_pretrained(sys.argv[1])
config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
assert ROPE_INIT_FUNCTIONS["linear"](config)[0].shape == (config.head_dim // 2,)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert isinstance(model, GenerationMixin)
assert model.generate(**tokenizer("12", return_tensors="pt"), max_new_tokens=1).shape == (1, 3)
assert isinstance(WatermarkingConfig().construct_processor(16, "cpu"), WatermarkLogitsProcessor)
old = type("Old", (transformers.PreTrainedModel,), {"prepare_inputs_for_generation": lambda self: None})
assert issubclass(auto_factory.add_generation_mixin_to_remote_model(old), GenerationMixin)
"""


def _run(code: str, model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_tokenizer_needs_no_models_and_models_come_when_they_are_asked_for(tiny_model: Path) -> None:
    _run(_LIGHT + _IMPORT + _NO_MODELS + _MODELS, tiny_model)


def test_a_version_of_transformers_that_takes_other_names_imports_all_that_it_wants(tiny_model: Path) -> None:
    """It finds no function of its own in a stand-in."""
    other_names = "from fusionrl.data import tokenizer\ntokenizer._CALLED = dict.fromkeys(tokenizer._CALLED, ())\n"
    _run(_LIGHT + other_names + _IMPORT + 'assert "transformers.generation.utils" in sys.modules\n', tiny_model)


def test_two_threads_that_leave_torch_out_put_the_usual_function_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(tokenizer._CONFIG)
    vars(module)["is_torch_available"] = usual = lambda: True
    monkeypatch.setattr(tokenizer, "sys", types.SimpleNamespace(modules={tokenizer._CONFIG: module}))
    entered, may_leave = threading.Event(), threading.Event()

    def second() -> None:
        with tokenizer.torch_left_out():
            entered.set()
            assert may_leave.wait(10)

    thread = threading.Thread(target=second)
    with tokenizer.torch_left_out():
        thread.start()
        entered.wait(0.2)  # it waits for this one to leave
    may_leave.set()
    thread.join(10)
    assert entered.is_set() and vars(module)["is_torch_available"] is usual
