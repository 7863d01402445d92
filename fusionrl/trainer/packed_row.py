"""The packed row of a micro-batch: its sequences one after the other, and this rank's part of it.

What need not be computed is left out: the last token of a sequence, which predicts nothing, and every prompt but one
where samples have the same (the samples of a GRPO group). A shared prompt's hidden states are those that each sample
would compute alone, and its gradient is the sum over the samples, so losses and gradients stay what they are; with 4
samples a prompt that is as long as their responses, the model runs over five tokens instead of eight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
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
    plan       makes the attention calls of the batch (`buckets`); none under context parallelism
    table      the same sequences for our own kernel, where that is for them
    positions  [T] of each packed token in its sequence, where sequences share tokens and so do not stand one
               after the other; then Megatron sees one sequence, and rotary embeddings are taken by these
    axes       [3, T] positions of the tokens of all context-parallel ranks in time, row and column: a model that sees
    images     the images that this rank puts into its row; None: it has none
    masks      of buckets in layers that need some, by the bucket's number and the window
    """

    lengths: tuple[int, ...] = ()
    plan: Callable[[], Sequence[Bucket]] = tuple
    table: RowTable | None = None
    positions: Tensor | None = None
    axes: Tensor | None = None
    images: ImageRows | None = None
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @cached_property
    def buckets(self) -> Sequence[Bucket]:
        """The attention calls, planned where a layer first asks: our own kernel (`table`) needs none."""
        return self.plan()


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
    keys = keys or [b""] * len(sequences)
    is_short = options.leaves_out_prompts and max(prompts, default=0) < LONG_PROMPT
    least_gain = LEAST_GAIN_SHORT if is_short else LEAST_GAIN
    shares = options.shares_prompts and sharing_gain(sequences, prompts, keys) >= least_gain
    tokens, positions, rows, lengths = _fill(sequences, prompts, keys, options, shares)
    # The local spec reads the offsets in Python; on the device, every layer would wait for it.
    where = torch.device("cpu") if options.local_attention else device
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32).to(where)
    held = zigzag_positions(lengths, slicing.cp_size, slicing.cp_rank)
    is_whole = options.local_attention and slicing.cp_size == 1
    shared = prompts or None if shares and options.leaves_out_prompts else None
    table = None
    if is_whole and torch.device(device).type == "cpu":
        from fusionrl.cpu import bitwise
        from fusionrl.cpu.row_functions import plan_rows

        if bitwise.is_on() or max(map(len, rows), default=0) <= LONGEST_ROW:
            table = plan_rows(rows, tokens.size)
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
            plan=partial(plan_buckets, rows, tokens.size, device, shared) if is_whole else tuple,
            table=table,
            positions=torch.from_numpy(positions).to(device) if shares else None,
        ),
        rows=rows,
        held=held,
        local=local,
    )


def sharing_gain(sequences: Sequence[np.ndarray], prompts: Sequence[int], keys: Sequence[bytes] = ()) -> float:
    """Tokens that a model runs over where each sequence brings its prompt, divided by those with each prompt once."""
    total, saved, known = 0, 0, set()
    for sequence, prompt, key in zip(sequences, prompts, keys or [b""] * len(sequences), strict=True):
        fed = _fed(sequence)
        head = fed[:prompt]
        total += fed.size
        saved += head.size if (head.tobytes(), key) in known else 0
        known.add((head.tobytes(), key))
    return total / (total - saved) if total else 1.0


def _fed(sequence: np.ndarray) -> np.ndarray:
    """Return a sequence without its last token, which predicts nothing."""
    return sequence[: max(sequence.size - 1, 1)]


def _fill(
    sequences: Sequence[np.ndarray],
    prompts: Sequence[int],
    keys: Sequence[bytes],
    options: BatchOptions,
    shares: bool,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[int]]:
    """Lay sequences out: each with its own padding, or with `shares` each prompt once, and the padding last.

    Returns the row's tokens and positions, where the tokens of each sequence are, and the lengths of padded sequences.
    """
    multiple, nothing = options.slicing.multiple, np.zeros(0, np.int64)
    pieces: list[tuple[np.ndarray, int, int]] = []  # tokens, the position of the first, length with padding
    rows: list[np.ndarray] = []
    size = 0

    def put(tokens: np.ndarray, first_position: int, length: int) -> np.ndarray:
        """Add a piece; return where its tokens stand."""
        nonlocal size
        pieces.append((tokens, first_position, length))
        size += length
        return size - length + np.arange(tokens.size)

    known: dict[tuple[bytes, bytes], np.ndarray] = {}
    if not sequences:
        sequences, prompts, keys = [np.zeros(2, np.int64)], [1], [b""]
    for sequence, prompt, more in zip(sequences, prompts, keys, strict=True):
        fed = sequence if options.whole_sequences else _fed(sequence)
        if not shares:
            rows.append(put(fed, 0, -(-fed.size // multiple) * multiple))
            continue
        head, tail = fed[:prompt], fed[prompt:]
        key = head.tobytes(), more
        if key not in known:
            known[key] = put(head, 0, head.size)
        rows.append(np.concatenate([known[key], put(tail, prompt, tail.size)]))
    if not size:  # of samples that failed before they had a token: a model runs over one token at least
        put(nothing, 0, multiple)
    if shares and size % multiple:
        put(nothing, 0, multiple - size % multiple)
    row, positions, start = np.zeros(size, np.int64), np.zeros(size, np.int64), 0
    for tokens, first_position, length in pieces:
        row[start : start + tokens.size] = tokens
        positions[start : start + length] = first_position + np.arange(length)
        start += length
    return row, positions, rows, [size] if shares else [length for _, _, length in pieces]


# ------------------------------------------------------------------------------------------------ attention calls
# Sequences up to this length share one padded attention call however much they differ: the call costs more.
SHORT_SEQUENCE = 64
# A prompt is left out of siblings' queries where it is at least as long, and as long as their own tokens. Below, the
# rows of all siblings in one causal call, of which a half is not computed, cost less. Measured on a CPU.
LONG_PROMPT = 256


@dataclass(frozen=True)
class Places:
    """Where tokens of a bucket's rows stand. Indices are None where they would change nothing."""

    length: int  # that each row is padded to
    sources: Tensor | None  # [tokens] packed token of each token of the rows; rows may share packed tokens
    cells: Tensor | None  # [tokens] where each goes in the padded [count * length]


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
    claimed = np.zeros(num_tokens, dtype=bool)  # tokens that are outputs of an earlier bucket
    unshared, families = _families(rows, prompts)
    parts = [(group, 0) for group in _by_length(unshared, [row.size for row in rows])]
    for prompt, members in families:
        parts += [(group, prompt) for group in _by_length(members, [row.size - prompt for row in rows])]
    is_alone = len(parts) == 1
    return [_bucket([rows[i] for i in sorted(group)], prompt, claimed, device, is_alone) for group, prompt in parts]


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


def _bucket(
    rows: Sequence[np.ndarray], prompt: int, claimed: np.ndarray, device: torch.device | str, is_alone: bool
) -> Bucket:
    """Make the bucket of these rows, of which `prompt` tokens do not ask. Its outputs are then claimed."""
    asking = [row[prompt:] for row in rows]
    length = max(row.size for row in asking)
    sources, cells = np.concatenate(asking), _cells(asking, length)
    targets, first = np.unique(sources, return_index=True)
    new = ~claimed[targets]
    targets, outputs = targets[new], cells[first[new]]
    claimed[targets] = True
    is_everything = is_alone and targets.size == claimed.size
    queries = _places(asking, length, device, is_everything)
    mask = None
    if prompt:
        mask = torch.ones(length, prompt + length, dtype=torch.bool, device=device).tril_(prompt)
    return Bucket(
        count=len(rows),
        rows=_places(rows, prompt + length, device, is_everything) if prompt else queries,
        queries=queries,
        mask=mask,
        outputs=_index(outputs, device, np.array_equal(outputs, np.arange(len(rows) * length))),
        targets=_index(targets, device, is_everything),
    )


def _places(rows: Sequence[np.ndarray], length: int, device: torch.device | str, is_everything: bool) -> Places:
    """Return where the tokens of rows stand; `is_everything`: they are the packed row."""
    sources, cells = np.concatenate(rows), _cells(rows, length)
    return Places(
        length=length,
        sources=_index(sources, device, is_everything and np.array_equal(sources, np.arange(sources.size))),
        cells=_index(cells, device, cells.size == len(rows) * length),
    )


def _index(values: np.ndarray, device: torch.device | str, is_identity: bool) -> Tensor | None:
    return None if is_identity else torch.from_numpy(values).to(device)


def _cells(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    return np.concatenate([index * length + np.arange(row.size) for index, row in enumerate(rows)])


# ------------------------------------------------------------------------------------------------ context parallelism
# Each rank holds two pieces of every sequence
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
