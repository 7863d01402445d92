"""Stage 4, pack: from a prepared shard to the micro-batches of an optimizer step, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.algorithms.estimators import Role
from fusionrl.algorithms.policy_losses import token_weights
from fusionrl.config.config import Config
from fusionrl.data.train_batch import FIELDS, TrainShard, TrainStep
from fusionrl.models.shape import ModelShape
from fusionrl.plan.layout import TrainerLayout, sequence_multiple
from fusionrl.trainer.outputs import Selection
from fusionrl.trainer.packed_row import PackedLayout, PackedRow, pack_row
from fusionrl.trainer.settings import aggregation_of, loss_length
from fusionrl.trainer.shards import Experts

if TYPE_CHECKING:
    from fusionrl.models.vision import VisionShape
    from fusionrl.trainer.model import Trained
    from fusionrl.trainer.multi_token import Ahead


@dataclass(frozen=True)
class Slicing:
    """Division of a packed sequence over the ranks of one data-parallel replica."""

    cp_size: int = 1
    cp_rank: int = 0
    sequence_parallel_size: int = 1  # tensor-parallel size where sequence parallelism is on, else 1
    sequence_parallel_rank: int = 0

    @property
    def multiple(self) -> int:
        """Each sequence's length is padded to a multiple of this."""
        return sequence_multiple(self.cp_size, self.sequence_parallel_size)


@dataclass
class MicroBatch:
    """One packed micro-batch; N chosen response tokens are on this rank.

    tokens           [1, T] int64
    position_ids     [1, T] int64
    layout           where the sequences stand
    selection        what the output layer computes
    weights          [N] fp32: `loss = sum(weights * token losses)` over all ranks
    sequence_shares  [N] fp32: each token's share of its attempt's trained tokens; their sum over all ranks is the
                     number of attempts that have one
    fields           [N] fp32 each: what the shard has for every response token, by its name there (loss_mask,
                     advantages, rollout_log_probs, log_probs, ref_log_probs, …)
    responses        [N] int64: where each chosen token stands among the micro-batch's response tokens
    sequences        [N] int64: which of `samples` each belongs to
    samples          indices into the shard
    response_lengths  response tokens of each sample
    starts           place of each sample's first token in the packed row of all context-parallel ranks
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
    """Options that are the same for all micro-batches of a rank.

    temperature: what logits are divided by, unless `has_sampled` and the shard says more of its tokens.
    has_sampled: the responses were sampled by the policy's engines.
    all_responses: choose every response token (scoring), not only those that are trained on.
    share_prompts: compute a prompt once for all samples of a micro-batch that have it; the positions of rotary
        embeddings are then given. Each kind of attention says whether it can (`may_share_prompts`).
    aggregation: how tokens' losses become one, see `policy_losses.token_weights`; with its constant.
    whole_sequences: the model runs over every token of every sample, its last one and each copy of a prompt included.
    replay_layers: those whose routers choose the experts that the engine chose; None: no router does.
    mtp_layers: layers of multi-token prediction, which look at tokens ahead.
    vision: the tower of a model that sees. runs_tower: it is on this rank's pipeline stage.
    """

    slicing: Slicing
    device: torch.device
    temperature: float
    chunk_size: int | None
    local_attention: bool
    has_sampled: bool = False
    share_prompts: bool = True
    aggregation: str = "token_mean"
    constant: float | None = None
    entropy_grad: bool = False
    all_responses: bool = False
    whole_sequences: bool = False
    replay_layers: list[int] | None = None
    mtp_layers: int = 0
    vision: VisionShape | None = None
    runs_tower: bool = False

    @classmethod
    def of(
        cls,
        config: Config,
        layout: TrainerLayout,
        shape: ModelShape,
        trained: Trained,
        device: torch.device,
        role: Role | None = None,
    ) -> BatchOptions:
        """The options of training; those of scoring are made of them (`score.py`)."""
        algorithm, routing = config.algorithm, trained.routing
        is_policy, is_prm = config.run.mode != "sft" and role is None, role == "prm"
        is_sampled = config.run.mode != "sft" and not is_prm
        sequence_parallel = trained.transformer.sequence_parallel
        return cls(
            slicing=Slicing(
                cp_size=layout.cp,
                cp_rank=parallel_state.get_context_parallel_rank(),
                sequence_parallel_size=layout.tp if sequence_parallel else 1,
                sequence_parallel_rank=parallel_state.get_tensor_model_parallel_rank() if sequence_parallel else 0,
            ),
            device=device,
            # A text that was not sampled has no temperature.
            temperature=config.rollout.rollout_temperature if is_sampled else 1.0,
            has_sampled=is_sampled,
            chunk_size=config.train.log_probs_chunk_size,
            local_attention=trained.transformer.transformer_impl == "local",
            share_prompts=config.train.share_prompts and shape.may_share_prompts,
            aggregation="sequence_mean" if is_prm else aggregation_of(config),
            constant=loss_length(config),
            entropy_grad=is_policy and algorithm.entropy_coef > 0,
            whole_sequences=is_policy and algorithm.loss_type == "custom_loss",
            mtp_layers=shape.mtp_layers,
            vision=shape.vision,
            runs_tower=shape.vision is not None and parallel_state.is_pipeline_first_stage(),
            replay_layers=routing.layers if routing is not None and algorithm.use_rollout_routing_replay else None,
        )

    @property
    def shares_prompts(self) -> bool:
        """Return whether a prompt is computed once: the attention can do it, and no sequence is needed whole."""
        return self.share_prompts and self.local_attention and self.slicing.cp_size == 1 and not self.whole_sequences

    @property
    def leaves_out_prompts(self) -> bool:
        """Return whether siblings' rows of attention leave out a long prompt that they share.

        They then need a mask, and with a mask torch's FlashAttention on a GPU gives way to a slower kernel. The length
        from which it pays was measured on a CPU.
        """
        return self.shares_prompts and self.device.type == "cpu"


_COLUMNS: dict[str, torch.dtype] = {
    "positions": torch.int64,
    "targets": torch.int64,
    "responses": torch.int64,
    "sequences": torch.int64,
    "weights": torch.float32,
    "sequence_shares": torch.float32,
}
_TOKEN_FIELDS = tuple(name for name, spec in FIELDS.items() if spec.extent == "response" and spec.dtype == np.float32)


def build_micro_batches(
    shard: TrainShard,
    step: TrainStep,
    options: BatchOptions,
    layout: TrainerLayout | None = None,
    experts: Experts | None = None,
) -> list[MicroBatch]:
    """All micro-batches of one optimizer step; at least one, for every rank takes part in its collectives.

    The plan gives all ranks the same number; the empty ones that the pipeline needs in addition come last.
    """
    groups = list(step.micro_batches) or [[]]
    if layout is not None:
        groups += [[]] * (round_up(len(groups), layout) - len(groups))
    return pack_groups(shard, groups, step, options, experts or {})


def pack_groups(
    shard: TrainShard, groups: list[list[int]], step: TrainStep | None, options: BatchOptions, experts: Experts
) -> list[MicroBatch]:
    """The micro-batches of these samples; where experts were recorded for the same samples, routers choose them."""
    batches = [build_micro_batch(shard, group, step, options) for group in groups]
    for batch in batches:
        batch.experts = experts.get(tuple(batch.samples), batch.experts)
    return batches


def round_up(count: int, layout: TrainerLayout) -> int:
    """The number of micro-batches that the pipeline runs for `count`: interleaved stages want a multiple of them."""
    return -(-count // layout.pp) * layout.pp if layout.vpp > 1 else count


def build_micro_batch(
    shard: TrainShard, samples: list[int], step: TrainStep | None, options: BatchOptions
) -> MicroBatch:
    """Pack `samples` of `shard`; without samples, one padding token whose loss weighs nothing.

    `step`: the optimizer step whose counts give the weights; None for weights of 0 (scoring).
    """
    everything, device = shard.split("tokens"), options.device
    tokens = [everything[i] for i in samples]
    prompts = [int(shard.total_lengths[i] - shard.response_lengths[i]) for i in samples]
    row = _packed(shard, samples, tokens, prompts, options)
    columns = _chosen_columns(shard, samples, tokens, prompts, row, step, options)
    is_hot = options.has_sampled and "temperatures" in columns
    if is_hot and options.whole_sequences:
        raise ValueError(
            "--loss-type custom_loss: samples were sampled at another temperature than --rollout-temperature, with"
            " which get_log_probs_and_entropy scores them; sample at that one, or set sample.temperature to None"
        )
    recorded = shard.split("rollout_routed_experts") if options.replay_layers is not None else []
    num_tokens = step.num_tokens if step is not None else 0
    ahead: tuple[Ahead, ...] = ()
    if options.mtp_layers and step is not None:
        from fusionrl.trainer.multi_token import ahead_of

        masks = shard.split("loss_mask")
        trained = [prompt + np.flatnonzero(masks[i]) for i, prompt in zip(samples, prompts, strict=True)]
        depths = range(1, options.mtp_layers + 1)
        ahead = tuple(ahead_of(depth, row, tokens, trained, num_tokens, device) for depth in depths)
    chosen = torch.nonzero(row.local[columns["positions"]] >= 0)[:, 0]
    mine = {name: values[chosen] for name, values in columns.items()}
    on_device = {name: values.to(device) for name, values in mine.items() if name not in ("positions", "responses")}
    return MicroBatch(
        tokens=row.tokens,
        position_ids=row.position_ids,
        layout=row.layout,
        selection=Selection(
            positions=row.local[mine["positions"]].to(device),
            targets=on_device["targets"],
            temperature=on_device["temperatures"] if is_hot else options.temperature,
            chunk_size=options.chunk_size,
            entropy_grad=options.entropy_grad,
            ahead=ahead,
        ),
        weights=on_device["weights"],
        sequence_shares=on_device["sequence_shares"],
        fields={name: values for name, values in on_device.items() if name not in _COLUMNS},
        responses=mine["responses"],
        sequences=on_device["sequences"],
        samples=list(samples),
        response_lengths=[int(shard.response_lengths[i]) for i in samples],
        starts=[int(places[0]) if len(places) else 0 for places in row.rows[: len(samples)]],
        total_lengths=[int(shard.total_lengths[i]) for i in samples],
        num_tokens=num_tokens,
        num_samples=step.num_samples if step is not None else 0,
        experts=row.experts([recorded[i] for i in samples] if recorded else [], options),
    )


def _packed(
    shard: TrainShard, samples: list[int], tokens: list[np.ndarray], prompts: list[int], options: BatchOptions
) -> PackedRow:
    """Pack the row of these samples, with their images."""
    keys: list[bytes] = []
    if shard.spans:
        from fusionrl.trainer.vision import prompt_keys

        keys = prompt_keys(shard, samples, prompts)
    row = pack_row(tokens, prompts, options, keys)
    if options.vision is not None:
        from fusionrl.trainer.vision import place_images

        place_images(shard, samples, row, options)
    return row


def _chosen_columns(
    shard: TrainShard,
    samples: list[int],
    tokens: list[np.ndarray],
    prompts: list[int],
    row: PackedRow,
    step: TrainStep | None,
    options: BatchOptions,
) -> dict[str, Tensor]:
    """`_COLUMNS` and the shard's fields, of the chosen tokens of all samples on all context-parallel ranks."""
    present = {name: shard.split(name) for name in _TOKEN_FIELDS if name in shard.fields}
    attempt_tokens = shard.fields.get("attempt_tokens")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in (*_COLUMNS, *present)}
    first_response = 0
    for position, (i, prompt, places) in enumerate(zip(samples, prompts, row.rows, strict=False)):
        num_response, mask = int(shard.response_lengths[i]), present["loss_mask"][i]
        offsets = np.arange(num_response) if options.all_responses else np.flatnonzero(mask)
        size = None if attempt_tokens is None else float(attempt_tokens[i])
        weights = np.zeros(mask.size)
        if step is not None:
            counts = step.num_tokens, step.num_samples
            weights = token_weights(mask, options.aggregation, *counts, options.constant, size)
        columns["positions"].append(places[prompt - 1 + offsets])
        columns["targets"].append(tokens[position][prompt + offsets])
        columns["responses"].append(first_response + offsets)
        columns["sequences"].append(np.full(offsets.size, position))
        columns["weights"].append(weights[offsets])
        columns["sequence_shares"].append(token_weights(mask, "sequence_mean", 0, 1, attempt_tokens=size)[offsets])
        for name, values in present.items():
            columns[name].append(values[i][offsets])
        first_response += num_response
    dtypes = {name: _COLUMNS.get(name, torch.float32) for name in columns}
    return {
        name: torch.from_numpy(np.concatenate(parts)).to(dtypes[name]) if parts else torch.zeros(0, dtype=dtypes[name])
        for name, parts in columns.items()
    }
