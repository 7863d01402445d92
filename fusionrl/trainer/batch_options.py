"""Options of packing a rank's micro-batches, from the configuration, the model and the rank's place in the layout."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from fusionrl.algorithms.estimators import Role
from fusionrl.config.config import Config
from fusionrl.models.shape import ModelShape
from fusionrl.plan.layout import TrainerLayout
from fusionrl.trainer.model import Trained
from fusionrl.trainer.packed_batch import BatchOptions, Slicing
from fusionrl.trainer.settings import aggregation_of, loss_length


def batch_options(
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
    return BatchOptions(
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
        share_prompts=config.train.share_prompts and shape.mla is None,
        aggregation="sequence_mean" if is_prm else aggregation_of(config),
        constant=loss_length(config),
        entropy_grad=is_policy and algorithm.entropy_coef > 0,
        whole_sequences=is_policy and algorithm.loss_type == "custom_loss",
        replay_layers=routing.layers if routing is not None and algorithm.use_rollout_routing_replay else None,
    )
