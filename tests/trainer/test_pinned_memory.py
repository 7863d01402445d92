"""Copies in blocks of one size. A CPU has no pinned memory: the blocks here are plain."""

from __future__ import annotations

import pytest
import torch

from fusionrl.plan.memory.pinned import BLOCK, pinned_bytes
from fusionrl.trainer.pinned_memory import PinnedMemory


@pytest.mark.parametrize("block", [16, 64, 4096])
def test_every_byte_comes_back(block: int) -> None:
    """Also of tensors that lie over several blocks, and of types of any width."""
    made: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    torch.manual_seed(1)
    tensors = [torch.randn(7, 5), torch.randn(3).bfloat16(), torch.arange(11), torch.zeros(0), torch.tensor(2.5)]
    memory = PinnedMemory(allocate, block)
    kept = [memory.keep(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, kept, strict=True):
        found = torch.empty_like(tensor)
        copy.read(found)
        assert torch.equal(found, tensor)
    whole = sum(tensor.nbytes for tensor in tensors)
    assert made == [block] * -(-whole // block), "no block more than the bytes need"
    for tensor, copy in zip(tensors, kept, strict=True):
        copy.write(tensor + 1)
    found = torch.empty_like(tensors[0])
    kept[0].read(found)
    assert torch.equal(found, tensors[0] + 1)


def test_the_plan_counts_blocks() -> None:
    """torch would take 16 GiB for 8 and a byte, and keep them."""
    assert BLOCK.bit_count() == 1, "torch rounds up to a power of two"
    assert [pinned_bytes(size) for size in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]
    assert pinned_bytes(8 * 2**30 + 1) == 8 * 2**30 + BLOCK
