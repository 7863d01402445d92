"""FLOPs of a model, against a count of the matrix products that torch does."""

from typing import Any

import pytest

from fusionrl.models.kinds import Delta
from fusionrl.models.kinds.delta import CHUNK
from fusionrl.models.shape import read_model_shape
from fusionrl.plan.costs import Work, train_flops
from fusionrl.plan.devices import peak_flops


@pytest.mark.parametrize(
    "family",
    ["qwen3", "gemma3_text", "deepseek_v3", "minimax_m2", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"],
)
def test_a_forward_and_a_backward_pass_as_torch_counts_them(family: str, hf: Any) -> None:
    """torch counts all pairs of attention, ours those that a causal model and its windows see. The length is whole
    chunks."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    folder, model = hf(family, False)
    shape, length = read_model_shape(folder), 128
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    work = Work.of([length])
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.arange(length)[None] % shape.vocab_size).logits
    forward = counter.get_total_flops()
    unseen = {kind: length**2 + (0 if kind.window is None else length - kind.window) ** 2 for kind in shape.attention}
    pairs = sum(kind.pair_flops(shape) / 3 * unseen[kind] for kind in shape.attention)
    deltas = [kind for kind in shape.attention if isinstance(kind, Delta)]
    pairs -= sum(CHUNK * (d.key_dim + d.value_dim) * d.value_heads * length for d in deltas)  # solved, which it misses
    # The norms' parameters are vectors.
    assert train_flops(shape, work) / 3 + pairs == pytest.approx(forward, rel=0.02)
    if deltas:  # transformers' backward pass of these multiplies more than it must
        return
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert train_flops(shape, work) + 3 * pairs == pytest.approx(forward + counter.get_total_flops(), rel=0.05)


def test_the_peak_of_a_card_by_its_name() -> None:
    for name, gib, teraflops in (
        ("NVIDIA H100 80GB HBM3", 80, 989),
        ("NVIDIA A100-SXM4-40GB", 40, 312),
        ("NVIDIA L40S", 45, 362),
        ("NVIDIA L4", 22, 121),
        ("NVIDIA GB200", 186, 2500),
        ("NVIDIA B200", 180, 2250),
        ("NVIDIA GeForce RTX 4090", 24, 165.2),
    ):
        assert peak_flops(name, gib * 2.0**30) == teraflops * 1e12
    assert [peak_flops(name) for name in ("NVIDIA H100 PCIe", "NVIDIA L40", "NVIDIA GeForce GT 1030", "")] == [None] * 4
