"""The packed row of a micro-batch: its sequences one after the other, and this rank's part of it.

What need not be computed is left out: the last token of a sequence, which predicts nothing, and every prompt but one
where samples have the same (the samples of a GRPO group). A shared prompt's hidden states are those that each sample
would compute alone, and its gradient is the sum over the samples, so losses and gradients stay what they are; with 4
samples a prompt that is as long as their responses, the model runs over five tokens instead of eight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from fusionrl.plan.memory.activations import LONGEST_ROW

if TYPE_CHECKING:
    from fusionrl.cpu.kernels import RowTable
    from fusionrl.trainer.micro_batches import BatchOptions
    from fusionrl.trainer.vision import ImageRows

# Tokens without sharing ÷ with it, from which a row shares its prompts: below, finding the shared tokens again in
# each layer's attention costs more than the prompt saves. Measured on a CPU (docs/results/performance.md): it costs
# less where prompts are short, as no row of attention leaves them out, and none needs a mask.
LEAST_GAIN = 1.3
LEAST_GAIN_SHORT = 1.1


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's description of packed sequences, with more that the modules here need; built once per batch.

    lengths    padded length of each sequence over all context-parallel ranks
    buckets    attention calls of the batch; unused under context parallelism
    table      the same sequences for our own kernel, where that is for them
    positions  [T] of each packed token in its sequence, where sequences share tokens and so do not stand one
               after the other; then Megatron sees one sequence, and rotary embeddings are taken by these
    axes       [3, T] positions of the tokens of all context-parallel ranks in time, row and column: a model that sees
    images     the images that this rank puts into its row; None: it has none
    masks      of buckets in layers that need some, by the bucket's number and the window
    """

    lengths: tuple[int, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    table: RowTable | None = None
    positions: Tensor | None = None
    axes: Tensor | None = None
    images: ImageRows | None = None
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


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
        from fusionrl.trainer.routing import FREE

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


# Sequences up to this length share one padded attention call however much they differ: the call costs more.
SHORT_SEQUENCE = 64
# A prompt is left out of siblings' queries where it is at least as long, and as long as their own tokens. Below, the
# rows of all siblings in one causal call, of which a half is not computed, cost less. Measured on a CPU.
LONG_PROMPT = 256


@dataclass(frozen=True)
class Places:
    """Where tokens of a bucket's rows stand. Indices are None where they would change nothing.

    length   that each row is padded to
    sources  [tokens] packed token of each token of the rows; rows may share packed tokens
    cells    [tokens] where each goes in the padded [count * length]
    """

    length: int
    sources: Tensor | None
    cells: Tensor | None


@dataclass(frozen=True)
class Bucket:
    """Rows (sequences) that share one padded attention call.

    count    rows in it
    rows     their tokens: keys and values
    queries  those of them that ask: the same, or the tokens after a prompt that another row computes
    mask     [queries' length, rows' length] True where a query sees a key; None: causal, the queries are the rows
    outputs  [outputs] cells of the queries whose result is kept, one a packed token; None: every one
    targets  [outputs] packed token that each is the result of; None: they are the packed row, in its order
    """

    count: int
    rows: Places
    queries: Places
    mask: Tensor | None
    outputs: Tensor | None
    targets: Tensor | None


def plan_buckets(
    rows: Sequence[np.ndarray],
    num_tokens: int,
    device: torch.device | str = "cpu",
    prompts: Sequence[int] | None = None,
) -> list[Bucket]:
    """Group rows so that none is padded to more than twice itself.

    rows                packed tokens of each sequence, in its order; tokens of the row of `num_tokens` in none are
                        padding
    num_tokens, device  of the packed row, and of the indices
    prompts             how many tokens at its begin each row may share with others; None: none
    """
    planner = _Planner(rows, num_tokens, device)
    unshared, families = _families(rows, prompts)
    parts = [(group, 0) for group in _by_length(unshared, [row.size for row in rows])]
    for prompt, members in families:
        parts += [(group, prompt) for group in _by_length(members, [row.size - prompt for row in rows])]
    return [planner.bucket(sorted(group), prompt, is_alone=len(parts) == 1) for group, prompt in parts]


def _families(
    rows: Sequence[np.ndarray], prompts: Sequence[int] | None
) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """(rows that are computed whole; (prompt, rows of which it is left out) of each long prompt that rows share)."""
    siblings: dict[tuple[int, int], list[int]] = defaultdict(list)
    unshared = []
    for i, row in enumerate(rows):
        prompt = prompts[i] if prompts is not None else 0
        if prompt >= LONG_PROMPT and row.size > prompt:
            siblings[int(row[0]), prompt].append(i)
        else:
            unshared.append(i)
    families = []
    for (_, prompt), members in siblings.items():
        # The longest computes the prompt: it would pad the others most.
        first, *rest = sorted(members, key=lambda i: -rows[i].size)
        unshared.append(first)
        left_out = [i for i in rest if rows[i].size - prompt <= prompt]
        unshared += [i for i in rest if rows[i].size - prompt > prompt]
        if left_out:
            families.append((prompt, left_out))
    return unshared, families


def _by_length(chosen: list[int], sizes: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in sorted((i for i in chosen if sizes[i]), key=lambda i: -sizes[i]):
        longest = sizes[groups[-1][0]] if groups else 0
        if groups and (2 * sizes[i] >= longest or longest <= SHORT_SEQUENCE):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class _Planner:
    """Makes buckets one after the other; each packed token is the output of the first bucket that has it."""

    def __init__(self, rows: Sequence[np.ndarray], num_tokens: int, device: torch.device | str) -> None:
        self.rows, self.num_tokens, self.device = rows, num_tokens, device
        self._claimed = np.zeros(num_tokens, dtype=bool)

    def bucket(self, chosen: list[int], prompt: int, is_alone: bool) -> Bucket:
        """Make the bucket of these rows, of which `prompt` tokens do not ask."""
        rows = [self.rows[i] for i in chosen]
        asking = [row[prompt:] for row in rows]
        length = max(row.size for row in asking)
        sources, cells = np.concatenate(asking), _cells(asking, length)
        targets, first = np.unique(sources, return_index=True)
        new = ~self._claimed[targets]
        targets, outputs = targets[new], cells[first[new]]
        self._claimed[targets] = True
        is_everything = is_alone and targets.size == self.num_tokens
        queries = self._places(asking, length, is_everything)
        mask = None
        if prompt:
            mask = torch.ones(length, prompt + length, dtype=torch.bool, device=self.device).tril_(prompt)
        return Bucket(
            count=len(rows),
            rows=self._places(rows, prompt + length, is_everything) if prompt else queries,
            queries=queries,
            mask=mask,
            outputs=self._index(outputs, np.array_equal(outputs, np.arange(len(rows) * length))),
            targets=self._index(targets, is_everything),
        )

    def _places(self, rows: Sequence[np.ndarray], length: int, is_everything: bool) -> Places:
        sources, cells = np.concatenate(rows), _cells(rows, length)
        return Places(
            length=length,
            sources=self._index(sources, is_everything and np.array_equal(sources, np.arange(self.num_tokens))),
            cells=self._index(cells, cells.size == len(rows) * length),
        )

    def _index(self, values: np.ndarray, is_identity: bool) -> Tensor | None:
        return None if is_identity else torch.from_numpy(values).to(self.device)


def _cells(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    return np.concatenate([index * length + np.arange(row.size) for index, row in enumerate(rows)])


# ---- context parallelism: each rank holds two pieces of every sequence
def zigzag_positions(lengths: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the packed sequence that `cp_rank` holds, in its local order.

    Each sequence is cut into 2 * cp pieces, of which rank r holds the r-th and the r-th from the end, so that
    causal attention costs every rank the same. Every length must be a multiple of 2 * cp_size, for cp_size > 1.
    """
    start, pieces = 0, [torch.zeros(0, dtype=torch.long)]
    for length in lengths:
        if cp_size == 1:
            pieces.append(torch.arange(start, start + length))
        else:
            assert length % (2 * cp_size) == 0, f"length {length} is not a multiple of {2 * cp_size}"
            piece = length // (2 * cp_size)
            for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
                pieces.append(torch.arange(start + index * piece, start + (index + 1) * piece))
        start += length
    return torch.cat(pieces)


def whole_row(part: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[t, ...] of each rank's tokens -> [T, ...] in the packed row's order, on each of them.

    The gradient of each part is summed over the ranks.
    """
    order = torch.cat([zigzag_positions(lengths, group.size(), rank) for rank in range(group.size())])
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel())
    return gather_from_sequence_parallel_region(part.contiguous(), True, group).index_select(0, places.to(part.device))
