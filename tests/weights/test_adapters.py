"""What engines get of adapters: files in their precision, by SGLang's conventions, of each adapter its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load

from fusionrl.models import hf_io
from fusionrl.models.trainable import AdapterSpec, adapter_rules
from fusionrl.trainer.push_source import PushSource
from fusionrl.weights import adapters
from tests.models.test_families import shape_of


def drawn(shape: Any, spec: AdapterSpec, value: float = 1.0) -> dict[str, torch.Tensor]:
    sizes = {name: sizes for rule in adapter_rules(shape, spec).values() for name, sizes in rule.hf.items()}
    return {name: torch.full(size, value) for name, size in sizes.items()}


def test_sglang_scales_by_alpha_over_rank_alone_and_joins_modules() -> None:
    shape, spec = shape_of("qwen3"), AdapterSpec(rank=4, alpha=6, use_rslora=True, targets=("v_proj",))
    files = adapters.engine_files(drawn(shape, spec).items(), spec, shape, "bfloat16")
    config = json.loads(files["adapter_config.json"].tobytes())
    assert config["lora_alpha"] / config["r"] == spec.scale == 3 and not config["use_rslora"]
    tensors = load(files["adapter_model.safetensors"].tobytes())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    layer = "base_model.model.model.layers.0.self_attn"
    for module, value in (("q_proj", 0), ("k_proj", 0), ("v_proj", 1)):
        a, b = (tensors[f"{layer}.{module}.lora_{half}.weight"] for half in "AB")
        assert (a == value).all() and (b == value).all() and a.shape == (4, shape.hidden_size)
    heads = shape.num_attention_heads * shape.head_dim
    assert tensors[f"{layer}.q_proj.lora_B.weight"].shape == (heads, 4) and not any("o_proj" in n for n in tensors)


def test_each_of_several_adapters_is_pushed(monkeypatch: Any) -> None:
    shape, spec = shape_of("qwen3"), AdapterSpec(rank=2, alpha=2)
    source: Any = SimpleNamespace(rank=0, adapter_spec=spec, shape=shape, _engine_dtype="float32", in_model=1.0)
    source.config = SimpleNamespace(
        lora=SimpleNamespace(lora_rank=2, lora_adapters=["math", "code=folder"], lora_adapter_path=None)
    )
    source._sender = None
    source.trained, source.reload = SimpleNamespace(chunks=[], transformer=None), lambda only_weights: None
    values, sent = {"math": 1.0, "code": 2.0}, list[Any]()

    @contextmanager
    def lent(name: str) -> Iterator[None]:
        source.in_model = values[name]
        yield
        source.in_model = 0.0

    def send(found: Any, *_: Any) -> None:
        sent.append({name: load(files["adapter_model.safetensors"].tobytes()) for name, files in found.items()})

    source.lent_adapter = lent
    monkeypatch.setattr(adapters, "send_files", send)
    monkeypatch.setattr(hf_io, "iter_hf_tensors", lambda *_, **__: iter(drawn(shape, spec, source.in_model).items()))
    PushSource.push_adapters(source, [], 3, 1.0)
    (found,) = sent
    assert {name: {t.unique().item() for t in tensors.values()} for name, tensors in found.items()} == {
        "math": {1.0},
        "code": {2.0},
    }
