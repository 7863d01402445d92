"""A rank's layers, whose they are and what is ours in them, and its device."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from fusionrl.config.config import Config
from fusionrl.cpu import megatron_patches
from fusionrl.plan.layout import TrainerLayout
from fusionrl.plan.trainer_plan import TrainerPlan
from fusionrl.trainer.settings import installed_impl, rank_device
from tests.models.test_families import shape_of
from tests.trainer.trainer_worker import config_of

if TYPE_CHECKING:
    from fusionrl.trainer.model_rank import ModelRank

PLAIN = {"gated_linear_unit": True}  # nothing changes


def values_and_gradients(rank: ModelRank, changes: dict[str, object]) -> None:
    """Compare an MLP of the rank's model with Megatron's own forward pass."""
    from megatron.core.transformer.mlp import MLP

    from fusionrl.trainer.local_layers import LocalMLP

    (mlp, *_) = [m for chunk in rank.trained.chunks for m in chunk.modules() if isinstance(m, MLP)]
    assert type(mlp) is LocalMLP
    kept = {name: getattr(mlp.config, name) for name in changes}
    vars(mlp.config).update(changes)
    hidden = torch.randn(5, 1, mlp.config.hidden_size, requires_grad=True)
    (ours, _), (theirs, _) = mlp(hidden), MLP.forward(mlp, hidden)
    weights = torch.randn_like(ours)
    found = [torch.autograd.grad((out * weights).sum(), hidden)[0] for out in (ours, theirs)]
    vars(mlp.config).update(kept)
    # Its own way is Megatron's bit by bit; the kernel of the plain gate rounds otherwise.
    tolerance = 1e-6 if changes == PLAIN else 0.0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("changes", [{"glu_linear_offset": 1.0}, {"activation_func_clamp_value": 0.1}, PLAIN], ids=str)
def test_an_mlp_computes_what_megatrons_does(workers, hf, changes: dict[str, object]) -> None:
    workers.start(config_of(hf("llama", True)[0]))
    workers.run(values_and_gradients, changes)


def test_without_a_kernel_the_gate_is_that_of_autograd() -> None:
    megatron_patches.install()
    from fusionrl.trainer.local_layers import swiglu

    both = torch.randn(5, 1, 12, dtype=torch.float64, requires_grad=True)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(swiglu(both), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, both)


def test_only_megatron_s_own_attention_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Transformer Engine's spec, too: another Megatron may put one of its own there, which computes otherwise."""
    megatron_patches.install()
    from fusionrl.trainer import layer_traits, layers

    other = type("FusedAttention", (layers.MLASelfAttention,), {})
    transformer: Any = SimpleNamespace(transformer_impl="transformer_engine", q_lora_rank=None)
    monkeypatch.setattr(layers, "get_transformer_layer_offset", lambda *args, **kwargs: 0)
    for module, wanted in ((layers.MLASelfAttention, layer_traits.PlainQuery), (other, other)):
        layer = SimpleNamespace(submodules=SimpleNamespace(self_attention=SimpleNamespace(module=module)))
        block = SimpleNamespace(layer_specs=[layer, layer])
        monkeypatch.setattr(layers, "get_gpt_decoder_block_spec", lambda *args, block=block, **kwargs: block)
        spec = layers.block_spec(transformer, shape_of("deepseek_v2"), None)
        assert [layer.submodules.self_attention.module for layer in spec.layer_specs or []] == [wanted] * 2


def test_scores_of_transformer_engine_have_the_scale_of_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of OLMo 3 with YaRN, which turns the layers without a window alone. That attention is not a Megatron module."""
    megatron_patches.install()
    from fusionrl.trainer import layers

    class Attention(torch.nn.Module):
        def __init__(self, config: object, softmax_scale: float | None = None) -> None:
            super().__init__()
            self.scale = softmax_scale

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    shape = shape_of("olmo3").model_copy(update={"rope_scaling": yarn})
    transformer: Any = SimpleNamespace(transformer_impl="transformer_engine", softmax_scale=None)
    scales = {}
    for kind in dict.fromkeys(shape.attention):
        parts = SimpleNamespace(core_attention=Attention)
        layer: Any = SimpleNamespace(self_attention=SimpleNamespace(module=None, submodules=parts))
        layers.FIT[type(kind)](kind, layer, transformer, shape)
        scales[kind.window] = parts.core_attention(transformer, softmax_scale=None).scale
    assert scales == {8: None, None: pytest.approx(shape.head_dim**-0.5 * (0.1 * math.log(4) + 1) ** 2)}


def test_norms_over_all_heads_are_no_part_of_the_spec() -> None:
    """Megatron-core 0.19 refuses those there, as `qk_layernorm` is off."""
    megatron_patches.install()
    from megatron.core.transformer.identity_op import IdentityOp

    from fusionrl.trainer import layer_traits, layers, local_layers

    spec = local_layers.get_gpt_layer_local_spec(qk_layernorm=False, normalization="RMSNorm")
    shape, transformer = shape_of("minimax_m2"), SimpleNamespace(transformer_impl="local", softmax_scale=None)
    fitted = layers.fitted_layer(spec, (shape.attention[0], shape.mlp[0]), transformer, shape)
    attention = fitted.submodules.self_attention
    assert {attention.submodules.q_layernorm, attention.submodules.k_layernorm} <= {None, IdentityOp}
    assert issubclass(attention.module, layers.SelfAttention) and issubclass(attention.module, layer_traits.WidthNorms)


PLAN = TrainerPlan(TrainerLayout(1), "cuda", "bf16", 1, None, {}, None)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")


def test_places(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank counted round would share a GPU, and NCCL would say so minutes later; so a place that is not seen ends."""
    assert rank_device(PLAN, 4, 1) == torch.device("cuda", 1)
    assert [rank_device(PLAN, rank).index for rank in range(3)] == [0, 1, 0]  # tools place nothing
    with pytest.raises(ValueError, match=r"rank 1: placed on GPU 7 of its node, where torch sees 2 \(6,7\)"):
        rank_device(PLAN, 1, 7)
    with pytest.raises(ValueError, match="--device cpu: a CUDA device is visible"):  # Megatron would put buffers there
        rank_device(replace(PLAN, device="cpu"), 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device"):
        rank_device(PLAN, 0)


@pytest.mark.parametrize(
    ("wanted", "device", "is_installed", "impl"),
    [
        ("auto", "cuda", True, "transformer_engine"),
        ("auto", "cuda", False, "local"),
        ("auto", "cpu", True, "local"),
        ("transformer_engine", "cuda", True, "transformer_engine"),
        ("transformer_engine", "cuda", False, None),
        ("transformer_engine", "cpu", True, None),
    ],
)
def test_whose_layers_a_rank_has(
    wanted: str, device: str, is_installed: bool, impl: str | None, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_installed else None)
    config = Config.from_flat({"transformer_impl": wanted})
    if impl is None:
        with pytest.raises(ValueError, match="it needs a CUDA device and the package"):
            installed_impl(config, device, "bf16")
    else:
        assert installed_impl(config, device, "bf16") == impl
