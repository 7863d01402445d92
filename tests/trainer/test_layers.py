"""What is ours in the layers: an MLP in fewer calls where it is a plain gated SiLU, and a query not compressed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from fusionrl.cpu import megatron_patches
from fusionrl.trainer.swiglu import swiglu
from tests.trainer.trainer_worker import config_of

if TYPE_CHECKING:
    from fusionrl.trainer.model_rank import ModelRank

PLAIN = {"gated_linear_unit": True}  # nothing changes


def values_and_gradients(rank: ModelRank, changes: dict[str, object]) -> None:
    """Compare an MLP of the rank's model with Megatron's own forward pass."""
    from megatron.core.transformer.mlp import MLP

    from fusionrl.trainer.layers import LocalMLP

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
    both = torch.randn(5, 1, 12, dtype=torch.float64, requires_grad=True)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(swiglu(both), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, both)


def test_only_megatron_s_own_attention_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Transformer Engine's spec, too: another Megatron may put one of its own there, which computes otherwise."""
    megatron_patches.install()
    from fusionrl.trainer import layers

    other = type("FusedAttention", (layers.MLASelfAttention,), {})
    attentions = [SimpleNamespace(module=module) for module in (layers.MLASelfAttention, other)]
    specs = [SimpleNamespace(submodules=SimpleNamespace(self_attention=attention)) for attention in attentions]
    monkeypatch.setattr(
        layers, "get_gpt_decoder_block_spec", lambda *args, **kwargs: SimpleNamespace(layer_specs=specs)
    )
    transformer: Any = SimpleNamespace(transformer_impl="transformer_engine")
    shape: Any = SimpleNamespace(mla=SimpleNamespace(q_lora_rank=None), output_norms=False)
    layers.block_spec(transformer, shape, None)
    assert [attention.module for attention in attentions] == [layers.PlainQuery, other]
