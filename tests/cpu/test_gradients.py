"""Gradients of weights that Megatron-core's linear layers add in place on a CPU."""

from types import SimpleNamespace

import torch

from fusionrl.cpu.megatron_patches import scale, unless_alone


def test_clipping_needs_no_memory_where_source_and_target_are_one() -> None:
    same, source, target = torch.ones(3), torch.ones(3), torch.zeros(3)
    place = same.data_ptr()
    scale(65536, torch.zeros(1), [[same, source], [same, target]], torch.tensor(0.5))
    assert same.data_ptr() == place
    assert same.tolist() == target.tolist() == [0.5] * 3
    assert source.tolist() == [1.0] * 3


def test_one_rank_exchanges_nothing() -> None:
    calls: list[bool] = []
    alone, two = (SimpleNamespace(size=lambda n=n: n) for n in (1, 2))
    call = unless_alone(lambda output, inputs, op=None, group=None, async_op=False: calls.append(async_op))
    whole, other = torch.arange(4.0), torch.zeros(4)
    call(whole[:4], whole, op="sum", group=alone)
    call(other, whole, op="sum", group=alone)
    assert torch.equal(other, whole)
    assert not calls
    call(other, whole, group=two)
    call(other, whole, group=alone, async_op=True)  # whoever asks waits for what it returns
    assert calls == [False, True]
