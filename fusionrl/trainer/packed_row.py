"""The packed row of a micro-batch: its sequences one after the other, and this rank's part of it.

What need not be computed is left out: the last token of a sequence, which predicts nothing, and every prompt but one
where samples have the same (the samples of a GRPO group). A shared prompt's hidden states are those that each sample
would compute alone, and its gradient is the sum over the samples, so losses and gradients stay what they are; with 4
samples a prompt that is as long as their responses, the model runs over five tokens instead of eight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fusionrl.plan.memory.activations import LONGEST_ROW
from fusionrl.trainer.attention_buckets import LONG_PROMPT, plan_buckets
from fusionrl.trainer.context_parallel import zigzag_positions
from fusionrl.trainer.local_attention import PackedLayout
from fusionrl.trainer.packed_batch import BatchOptions
from fusionrl.trainer.routing import FREE

# Tokens without sharing ÷ with it, from which a row shares its prompts: below, finding the shared tokens again in
# each layer's attention costs more than the prompt saves. Measured on a CPU (docs/results/performance.md): it costs
# less where prompts are short, as no row of attention leaves them out, and none needs a mask.
LEAST_GAIN = 1.3
LEAST_GAIN_SHORT = 1.1


@dataclass(frozen=True)
class PackedRow:
    """One packed row.

    tokens, position_ids  [1, T] int64 of this context-parallel rank
    layout                where the sequences stand
    rows                  of each sequence, where its tokens are in the row of all context-parallel ranks
    held                  [T] places in that row that this rank has
    local                 the inverse: place in that row → place on this rank, -1 where it is another rank's
    """

    tokens: Tensor
    position_ids: Tensor
    layout: PackedLayout
    rows: list[np.ndarray]
    held: Tensor
    local: Tensor

    def experts(self, recorded: Sequence[np.ndarray], options: BatchOptions) -> Tensor | None:
        """The experts of this rank's tokens; where sequences share a token, those of the first of them.

        recorded  [tokens, layers, topk] of each sequence; a last token that is not fed has no place
        options   their `replay_layers` are those that are wanted

        Returns [T / sequence parallel size, len(replay_layers), topk] int16, `FREE` for tokens of no sequence; None
        without a sequence.
        """
        if options.replay_layers is None or not recorded:
            return None
        layers, slicing = options.replay_layers, options.slicing
        experts = np.full((self.local.numel(), len(layers), recorded[0].shape[-1]), FREE, np.int16)
        for part, row in reversed(list(zip(recorded, self.rows, strict=True))):
            experts[row] = part[: row.size, layers]
        held = torch.from_numpy(experts)[self.held]
        return held.chunk(slicing.sequence_parallel_size)[slicing.sequence_parallel_rank]


def pack_row(
    sequences: Sequence[np.ndarray], prompts: Sequence[int], options: BatchOptions, keys: Sequence[bytes] = ()
) -> PackedRow:
    """Pack `sequences`, which begin with a prompt of so many tokens; without any, one padding token.

    keys  what tells apart prompts of the same tokens; none: nothing does
    """
    slicing, device = options.slicing, options.device
    filling = _Filling(slicing.multiple)
    keys = keys or [b""] * len(sequences)
    shares = options.shares_prompts and sharing_gain(sequences, prompts, keys) >= _least_gain(prompts, options)
    if shares:
        filling.fill_sharing(sequences, prompts, keys)
    else:
        filling.fill(sequences, options.whole_sequences)
    tokens, positions, lengths = np.concatenate(filling.tokens), np.concatenate(filling.positions), filling.lengths
    # The local spec reads the offsets in Python; on the device, every layer would wait for it.
    where = torch.device("cpu") if options.local_attention else device
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32).to(where)
    held = zigzag_positions(lengths, slicing.cp_size, slicing.cp_rank)
    is_whole = options.local_attention and slicing.cp_size == 1
    shared = prompts or None if shares and options.leaves_out_prompts else None
    buckets = tuple(plan_buckets(filling.rows, tokens.size, device, shared)) if is_whole else ()
    is_short = max((row.size for row in filling.rows), default=0) <= LONGEST_ROW
    table = None
    if is_whole and is_short and torch.device(device).type == "cpu":
        from fusionrl.cpu.row_functions import plan_rows

        table = plan_rows(filling.rows, tokens.size)
    # How long the table of rotary embeddings must be.
    longest = int(positions.max()) + 1 if shares else max(lengths)
    local = torch.full((tokens.size,), -1)
    local[held] = torch.arange(held.numel())
    return PackedRow(
        tokens=torch.from_numpy(tokens)[held][None].to(device),
        position_ids=torch.from_numpy(positions)[held][None].to(device),
        layout=PackedLayout(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
            buckets=buckets,
            table=table,
            positions=torch.from_numpy(positions).to(device) if shares else None,
        ),
        rows=filling.rows,
        held=held,
        local=local,
    )


def _least_gain(prompts: Sequence[int], options: BatchOptions) -> float:
    is_short = options.leaves_out_prompts and max(prompts, default=0) < LONG_PROMPT
    return LEAST_GAIN_SHORT if is_short else LEAST_GAIN


def sharing_gain(sequences: Sequence[np.ndarray], prompts: Sequence[int], keys: Sequence[bytes] = ()) -> float:
    """Tokens that a model runs over where each sequence brings its prompt, divided by those with each prompt once."""
    keys = keys or [b""] * len(sequences)
    fed = [_fed(sequence, keeps_last=False) for sequence in sequences]
    heads = [part[:prompt] for part, prompt in zip(fed, prompts, strict=True)]
    once = {(head.tobytes(), key): head.size for head, key in zip(heads, keys, strict=True)}
    saved = sum(head.size for head in heads) - sum(once.values())
    total = sum(part.size for part in fed)
    return total / (total - saved) if total else 1.0


class _Filling:
    """A row that is being filled, piece by piece; sequences are padded to a multiple of `multiple`."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.rows: list[np.ndarray] = []
        self.lengths: list[int] = []
        self._size = 0

    def fill(self, sequences: Sequence[np.ndarray], keeps_last: bool) -> None:
        """Add each sequence with its own padding."""
        for sequence in sequences or [np.zeros(2, np.int64)]:
            fed = _fed(sequence, keeps_last)
            self.rows.append(self._put(fed, 0, -(-fed.size // self.multiple) * self.multiple))
        self._pad_nothing()

    def fill_sharing(self, sequences: Sequence[np.ndarray], prompts: Sequence[int], keys: Sequence[bytes]) -> None:
        """Add each prompt once and the responses after it; the padding comes last."""
        known: dict[tuple[bytes, bytes], np.ndarray] = {}
        nothing = ([np.zeros(2, np.int64)], [1], [b""])
        for sequence, prompt, more in zip(*((sequences, prompts, keys) if sequences else nothing), strict=True):
            fed = _fed(sequence, keeps_last=False)
            head, tail = fed[:prompt], fed[prompt:]
            key = head.tobytes(), more
            if key not in known:
                known[key] = self._put(head, 0, head.size)
            self.rows.append(np.concatenate([known[key], self._put(tail, prompt, tail.size)]))
        self._pad_nothing()
        if self._size % self.multiple:
            self._put(np.zeros(0, np.int64), 0, self.multiple - self._size % self.multiple)
        self.lengths = [self._size]

    def _pad_nothing(self) -> None:
        """A row of samples that failed before they had a token: a model runs over one token at least."""
        if not self._size:
            self._put(np.zeros(0, np.int64), 0, self.multiple)

    def _put(self, tokens: np.ndarray, first_position: int, length: int) -> np.ndarray:
        """Add a piece of `length` that begins with `tokens`; return where these stand."""
        piece = np.zeros(length, dtype=np.int64)
        piece[: tokens.size] = tokens
        self.tokens.append(piece)
        self.positions.append(first_position + np.arange(length))
        self.lengths.append(length)
        self._size += length
        return self._size - length + np.arange(tokens.size)


def _fed(sequence: np.ndarray, keeps_last: bool) -> np.ndarray:
    return sequence if keeps_last else sequence[: max(sequence.size - 1, 1)]
