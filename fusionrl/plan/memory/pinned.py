"""Pinned host memory as the trainers take it, for the trainers and for the plan.

torch rounds a pinned allocation up to a power of two, by up to twice its size, and never gives it back to the system.
So we request blocks of such sizes and cut the tensors over them.
"""

BLOCK = 64 * 2**20


def pinned_bytes(size: float) -> int:
    """Bytes of the blocks that hold `size` bytes, which were kept one after the other."""
    return -(-int(size) // BLOCK) * BLOCK
