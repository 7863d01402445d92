"""From a train shard to packed micro-batches on the device.

The sequences of a micro-batch stand one after the other in one row. What need not be computed is left out of
it: the last token of a sequence, which predicts nothing, and every prompt but one where samples have the
same (the samples of a GRPO group). A shared prompt's hidden states are those that each sample would compute
alone, and its gradient is the sum over the samples, so losses and gradients stay what they are; with 4
samples a prompt that is as long as their responses, the model runs over five tokens instead of eight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fusionrl.algorithms.aggregation import token_weights
from fusionrl.data.train_batch import FIELDS, TrainShard, TrainStep
from fusionrl.plan.layout import TrainerLayout, sequence_multiple
from fusionrl.trainer.routing import pack_routing
from fusionrl.upstream.local_spec import PackedLayout, plan_buckets, zigzag_positions


@dataclass(frozen=True)
class Slicing:
    """How a packed sequence is divided over the ranks of one data-parallel replica."""

    cp_size: int = 1
    cp_rank: int = 0
    sequence_parallel_size: int = 1  # tensor-parallel size where sequence parallelism is on, else 1
    sequence_parallel_rank: int = 0

    @property
    def multiple(self) -> int:
        """What each sequence's length is padded to a multiple of."""
        return sequence_multiple(self.cp_size, self.sequence_parallel_size)


@dataclass
class Selection:
    """Which hidden states go through the output layer, and to what end.

    positions  [N] in this rank's packed row, of the tokens that predict a chosen one
    targets    [N] the chosen tokens' ids
    """

    positions: Tensor
    targets: Tensor
    temperature: float
    chunk_size: int | None
    entropy_grad: bool = False


@dataclass
class MicroBatch:
    """One packed micro-batch; N chosen response tokens are on this rank.

    tokens           [1, T] int64
    position_ids     [1, T] int64
    layout           where the sequences stand
    selection        what the output layer computes
    weights          [N] fp32: `loss = sum(weights * token losses)` over all ranks
    sequence_shares  [N] fp32: each token's share of its sample's trained tokens; their sum over all ranks is the number
                     of samples that have one
    fields           [N] fp32 each: what the shard has for every response token, by its name there (loss_mask,
                     advantages, rollout_log_probs, log_probs, ref_log_probs, …)
    responses        [N] int64: where each chosen token stands among the micro-batch's response tokens
    sequences        [N] int64: which of `samples` each belongs to
    samples          indices into the shard
    response_lengths  response tokens of each sample
    starts           where each sample's first token stands in the packed row of all context-parallel ranks
    total_lengths    tokens of each sample
    num_tokens, num_samples  of the whole optimizer step, over all ranks
    experts          [T / sequence parallel size, this rank's mixtures, topk] int16, those that routers must choose, -1
                     where they are free; None: everywhere (`routing.py`)
    """

    tokens: Tensor
    position_ids: Tensor
    layout: PackedLayout
    selection: Selection
    weights: Tensor
    sequence_shares: Tensor
    fields: dict[str, Tensor]
    responses: Tensor
    sequences: Tensor
    samples: list[int]
    response_lengths: list[int]
    starts: list[int]
    total_lengths: list[int]
    num_tokens: int
    num_samples: int
    experts: Tensor | None = None


@dataclass(frozen=True)
class BatchOptions:
    """What is the same for all micro-batches of a rank.

    all_responses: choose every response token (scoring), not only those that are trained on.
    share_prompts: compute a prompt once for all samples of a micro-batch that have it; the positions of rotary
        embeddings are then given, which latent attention, with embeddings of its own, cannot take.
    aggregation: how tokens' losses become one, see `algorithms.aggregation`; with its constant.
    whole_sequences: the model runs over every token of every sample, its last one and each copy of a prompt included.
    replay_layers: those whose routers choose the experts that the engine chose; None: no router does.
    """

    slicing: Slicing
    device: torch.device
    temperature: float
    chunk_size: int | None
    local_attention: bool
    share_prompts: bool = True
    aggregation: str = "token_mean"
    constant: float | None = None
    entropy_grad: bool = False
    all_responses: bool = False
    whole_sequences: bool = False
    replay_layers: list[int] | None = None


def check_shard(shard: TrainShard) -> None:
    """Refuse a shard that no loss can be computed from.

    Raises:
        ValueError: a sample without a prompt token, for nothing predicts the first token of a text.
    """
    bad = np.flatnonzero((shard.response_lengths > 0) & (shard.response_lengths >= shard.total_lengths))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"sample {int(shard.fields['sample_index'][i])} has {int(shard.total_lengths[i])} tokens, all of "
            "them response: the first token of a text is predicted by nothing; give the sample at least one "
            "prompt token"
        )


def build_micro_batch(
    shard: TrainShard, samples: list[int], step: TrainStep | None, options: BatchOptions
) -> MicroBatch:
    """Pack `samples` of `shard`; without samples, one padding token whose loss weighs nothing.

    Args:
        shard: this rank's shard.
        samples: indices into it.
        step: the optimizer step whose counts give the weights; None for weights of 0 (scoring).
        options: as above.
    """
    tokens, masks = shard.split("tokens"), shard.split("loss_mask")
    present = {name: shard.split(name) for name in _TOKEN_FIELDS if name in shard.fields}
    prompts = [int(shard.total_lengths[i] - shard.response_lengths[i]) for i in samples]
    packed = _pack([tokens[i] for i in samples], prompts, options)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*_COLUMNS, *present)}
    response_lengths, first_response = [], 0
    for position, (i, prompt, row) in enumerate(zip(samples, prompts, packed.rows, strict=False)):
        num_response, mask = int(shard.response_lengths[i]), masks[i]
        offsets = np.arange(num_response) if options.all_responses else np.flatnonzero(mask)
        columns["positions"].append(row[prompt - 1 + offsets])
        columns["targets"].append(tokens[i][prompt + offsets])
        columns["responses"].append(first_response + offsets)
        columns["sequences"].append(np.full(offsets.size, position))
        columns["weights"].append(_weights(mask, step, options)[offsets])
        columns["sequence_shares"].append(token_weights(mask, "sequence_mean", 0, 1)[offsets])
        for name, values in present.items():
            columns[name].append(values[i][offsets])
        response_lengths.append(num_response)
        first_response += num_response
    flat = {name: _join(parts, _COLUMNS.get(name, torch.float32)) for name, parts in columns.items()}

    slicing = options.slicing
    held = zigzag_positions(packed.lengths, slicing.cp_size, slicing.cp_rank)
    local = torch.full((sum(packed.lengths),), -1)
    local[held] = torch.arange(held.numel())
    chosen = torch.nonzero(local[flat["positions"]] >= 0)[:, 0]
    device = options.device

    def pick(name: str) -> Tensor:
        return flat[name][chosen].to(device)

    return MicroBatch(
        tokens=torch.from_numpy(packed.tokens)[held][None].to(device),
        position_ids=torch.from_numpy(packed.positions)[held][None].to(device),
        layout=_layout(packed, options),
        selection=Selection(
            positions=local[flat["positions"][chosen]].to(device),
            targets=pick("targets"),
            temperature=options.temperature,
            chunk_size=options.chunk_size,
            entropy_grad=options.entropy_grad,
        ),
        weights=pick("weights"),
        sequence_shares=pick("sequence_shares"),
        fields={name: pick(name) for name in present},
        responses=flat["responses"][chosen],
        sequences=pick("sequences"),
        samples=list(samples),
        response_lengths=response_lengths,
        starts=[int(row[0]) for row in packed.rows[: len(samples)]],
        total_lengths=[int(shard.total_lengths[i]) for i in samples],
        num_tokens=step.num_tokens if step is not None else 0,
        num_samples=step.num_samples if step is not None else 0,
        experts=_experts(shard, samples, packed, held, options),
    )


def _experts(
    shard: TrainShard, samples: list[int], packed: _Packed, held: Tensor, options: BatchOptions
) -> Tensor | None:
    if options.replay_layers is None or not samples:
        return None
    recorded = shard.split("rollout_routed_experts")
    whole = pack_routing([recorded[i] for i in samples], packed.rows, packed.tokens.size, options.replay_layers)
    own = torch.from_numpy(whole)[held]
    slicing = options.slicing
    return own.chunk(slicing.sequence_parallel_size)[slicing.sequence_parallel_rank]


def round_up(count: int, layout: TrainerLayout) -> int:
    """The number of micro-batches that the pipeline runs for `count`: interleaved stages want a multiple of them."""
    return -(-count // layout.pp) * layout.pp if layout.vpp > 1 else count


def build_micro_batches(
    shard: TrainShard, step: TrainStep, options: BatchOptions, layout: TrainerLayout | None = None
) -> list[MicroBatch]:
    """All micro-batches of one optimizer step; at least one, for every rank takes part in its collectives.

    The plan gives all ranks the same number; the empty ones that the pipeline needs besides come last.
    """
    groups = list(step.micro_batches) or [[]]
    if layout is not None:
        groups += [[]] * (round_up(len(groups), layout) - len(groups))
    return [build_micro_batch(shard, group, step, options) for group in groups]


_COLUMNS: dict[str, torch.dtype] = {
    "positions": torch.int64,
    "targets": torch.int64,
    "responses": torch.int64,
    "sequences": torch.int64,
    "weights": torch.float32,
    "sequence_shares": torch.float32,
}
_TOKEN_FIELDS = tuple(name for name, spec in FIELDS.items() if spec.extent == "response" and spec.dtype == np.float32)


def _join(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def _weights(mask: np.ndarray, step: TrainStep | None, options: BatchOptions) -> np.ndarray:
    if step is None:
        return np.zeros(mask.size)
    return token_weights(mask, options.aggregation, step.num_tokens, step.num_samples, options.constant)


@dataclass(frozen=True)
class _Packed:
    """One packed row over all context-parallel ranks: tokens, positions [T]; where each sequence is in it."""

    tokens: np.ndarray
    positions: np.ndarray
    rows: list[np.ndarray]
    lengths: list[int]
    shared: bool


def _pack(sequences: list[np.ndarray], prompts: list[int], options: BatchOptions) -> _Packed:
    multiple = options.slicing.multiple
    whole = options.whole_sequences
    share = options.share_prompts and options.local_attention and options.slicing.cp_size == 1 and not whole
    pieces: list[np.ndarray] = []
    places: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    lengths: list[int] = []
    known: dict[bytes, np.ndarray] = {}
    start = 0

    def put(tokens: np.ndarray, first_position: int, length: int) -> np.ndarray:
        nonlocal start
        piece = np.zeros(length, dtype=np.int64)
        piece[: tokens.size] = tokens
        pieces.append(piece)
        places.append(first_position + np.arange(length))
        lengths.append(length)
        start += length
        return start - length + np.arange(tokens.size)

    for sequence, prompt in zip(sequences or [np.zeros(2, np.int64)], prompts or [1], strict=True):
        fed = sequence if whole else sequence[: max(sequence.size - 1, 1)]
        if not share:
            rows.append(put(fed, 0, -(-fed.size // multiple) * multiple))
            continue
        head, tail = fed[:prompt], fed[prompt:]
        key = head.tobytes()
        if key not in known:
            known[key] = put(head, 0, head.size)
        rows.append(np.concatenate([known[key], put(tail, prompt, tail.size)]))
    if share and start % multiple:
        put(np.zeros(0, np.int64), 0, multiple - start % multiple)
    return _Packed(np.concatenate(pieces), np.concatenate(places), rows, [start] if share else lengths, share)


def _layout(packed: _Packed, options: BatchOptions) -> PackedLayout:
    # The local spec reads the offsets in Python; on the device, every layer would wait for it.
    where = torch.device("cpu") if options.local_attention else options.device
    whole = options.local_attention and options.slicing.cp_size == 1
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(packed.lengths)]), dtype=torch.int32).to(where)
    # How long the table of rotary embeddings must be.
    longest = int(packed.positions.max()) + 1 if packed.shared else max(packed.lengths)
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(packed.lengths),
        buckets=tuple(plan_buckets(packed.rows, packed.tokens.size, options.device)) if whole else (),
        positions=torch.from_numpy(packed.positions).to(options.device) if packed.shared else None,
    )
