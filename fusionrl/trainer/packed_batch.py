"""A packed micro-batch on the device, and the options by which shards are packed (`micro_batches.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from torch import Tensor

from fusionrl.algorithms.estimators import Role
from fusionrl.config.config import Config
from fusionrl.models.shape import ModelShape
from fusionrl.plan.layout import TrainerLayout, sequence_multiple
from fusionrl.trainer.local_attention import PackedLayout
from fusionrl.trainer.settings import aggregation_of, loss_length

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
class Selection:
    """The hidden states that go through the output layer, and their use.

    positions  [N] in this rank's packed row, of the tokens that predict a chosen one
    targets    [N] the chosen tokens' ids
    temperature  what logits are divided by: one number, or [N]
    ahead      what each layer of multi-token prediction computes in training
    """

    positions: Tensor
    targets: Tensor
    temperature: float | Tensor
    chunk_size: int | None
    entropy_grad: bool = False
    ahead: tuple[Ahead, ...] = ()


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
    aggregation: how tokens' losses become one, see `algorithms.aggregation`; with its constant.
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
