"""The part of the logits that is in memory at a time: the blocks of the output layer's log-probs."""

BLOCK_BYTES = 32 << 20
KEPT_BYTES = 128 << 20


def block_sizes(num_tokens: int, hidden_size: int, num_rows: int, chunk_size: int | None = None) -> tuple[int, int]:
    """(rows of the output layer in one block, blocks that are kept for backward).

    A block is fp32 logits [num_tokens, rows]. The trainer's loss (`trainer/log_probs.py`) is cut by this function.

    num_rows    of the output layer on this rank, V/tp
    chunk_size  --log-probs-chunk-size; None: blocks of `BLOCK_BYTES`, of which `KEPT_BYTES` are kept
    """
    column_bytes = 4 * max(num_tokens, 1)
    if chunk_size is None:
        # Narrower than the hidden states, adding to their gradient would cost more than the products.
        width, kept_bytes = max(BLOCK_BYTES // column_bytes, hidden_size), KEPT_BYTES
    else:
        kept_bytes = 4 * chunk_size * num_rows
        width = kept_bytes // column_bytes
    width = min(max(width, 1), num_rows)
    return width, kept_bytes // (width * column_bytes)


def head_kept_bytes(num_tokens: int, hidden_size: int, num_rows: int, width: int, chunk_size: int | None = None) -> int:
    """Bytes that the loss keeps from forward to backward for `num_tokens` log-probs.

    `width`: bytes of a hidden value. Next to the hidden states [N, h] and the kept logits: the tokens' positions and
    targets (int64), log-sum-exp and entropy (fp32).
    """
    columns, num_kept = block_sizes(num_tokens, hidden_size, num_rows, chunk_size)
    kept_columns = min(num_kept * columns, num_rows)
    return num_tokens * (hidden_size * width + 4 * kept_columns + 8 + 8 + 4 + 4)


def head_transient_bytes(
    num_tokens: int,
    hidden_size: int,
    num_rows: int,
    width: int,
    chunk_size: int | None = None,
    *,
    entropy_grad: bool = False,
    is_frozen: bool = False,
) -> int:
    """Bytes that the loss needs for a moment.

    Forward: two blocks of logits. Backward: one (two with the entropy's gradient), the gradient of its input in fp32,
    and that of the output layer's weights, unless these are frozen.
    """
    columns, _ = block_sizes(num_tokens, hidden_size, num_rows, chunk_size)
    block = 4 * num_tokens * columns
    backward = (1 + entropy_grad) * block + 4 * num_tokens * hidden_size
    backward += 0 if is_frozen else width * num_rows * hidden_size
    return max(2 * block, backward)
