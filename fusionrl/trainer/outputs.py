"""GPT models whose last stage gives what the trainer asks for: log-probs of chosen tokens, or a critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from fusionrl.trainer.log_probs import chunked_log_probs

if TYPE_CHECKING:
    from fusionrl.trainer.multi_token import Ahead


@dataclass
class Selection:
    """The hidden states that go through the output layer, and their use."""

    positions: Tensor  # [N] in this rank's packed row, of the tokens that predict a chosen one
    targets: Tensor  # [N] the chosen tokens' ids
    temperature: float | Tensor  # what logits are divided by: one number, or [N]
    chunk_size: int | None
    entropy_grad: bool = False
    ahead: tuple[Ahead, ...] = ()  # what each layer of multi-token prediction computes in training


class ChosenOutputs(GPTModel):
    """A GPTModel whose last stage gives log-probs and entropies of chosen tokens instead of all logits.

    Called with `labels=Selection`, it returns [2, N] fp32 (log-probs, entropies) on the last pipeline stage;
    without labels, logits [1, T, V/tp] as GPTModel does.
    """

    real_vocab_size: int
    logits_scale: float = 1.0  # what logits are divided by

    def forget_images(self) -> None:
        """Drop what was kept of images, as weights or images are others now."""

    def _preprocess(self, *args: object, packed_seq_params: object = None, **kwargs: object) -> tuple[object, ...]:
        parts = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        positions = getattr(packed_seq_params, "positions", None)
        if positions is None:
            return parts
        # A table of one entry a packed token: Megatron applies it as it stands, not by offset in a sequence.
        return (parts[0], parts[1].index_select(0, positions), *parts[2:])

    def _postprocess(
        self, hidden_states: Tensor, *args: object, labels: Selection | None = None, **kwargs: object
    ) -> Tensor:
        if not self.post_process:
            return super()._postprocess(hidden_states, *args, labels=None, **kwargs)
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        if labels is None:
            if not self.mtp_process:
                outputs = super()._postprocess(hidden_states, *args, labels=None, **kwargs)
            else:  # Megatron's looks for labels of these layers
                outputs = self.output_layer(hidden_states, weight=weight)[0].transpose(0, 1).contiguous()
            return outputs / self.logits_scale if self.logits_scale != 1.0 else outputs
        for hook in self.output_layer._forward_pre_hooks.values():
            if hook.__module__ == DistributedDataParallel.__module__:  # overlapped gathering waits for the weight
                hook(self.output_layer, ())
        if labels.ahead and self.training:
            from fusionrl.trainer.multi_token import predict_ahead

            def of_layer(hidden: Tensor, work: Ahead) -> Tensor:
                chosen = Selection(work.positions, work.targets, 1.0, labels.chunk_size)
                return self._chosen(hidden, weight.detach(), chosen)[0]

            predict_ahead(self, hidden_states, labels.ahead, kwargs, of_layer)
        return torch.stack(self._chosen(hidden_states, weight, labels))

    def _chosen(self, hidden_states: Tensor, weight: Tensor, labels: Selection) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of chosen tokens."""
        group = self.pg_collection.tp
        # Every rank's gradient of the hidden states comes from its own part of the vocabulary: both branches
        # sum the parts in backward.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return chunked_log_probs(
            hidden[:, 0].index_select(0, labels.positions),
            weight,
            labels.targets,
            vocab_size=self.real_vocab_size,
            temperature=labels.temperature * self.logits_scale if self.logits_scale != 1.0 else labels.temperature,
            chunk_size=labels.chunk_size,
            entropy_grad=labels.entropy_grad,
            group=group,
        )


class ValueModel(ChosenOutputs):
    """A critic: its last stage gives a value for each chosen position.

    Called with `labels=Selection`, it returns [1, N] fp32 on the last pipeline stage. The head stands whole on every
    tensor-parallel rank and sees all positions, so its gradient is whole on each of them, too.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def sharded_state_dict(self, *args: object, **kwargs: object) -> Any:
        """Return the state of a checkpoint; a GPTModel's own looks for the output layer."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)

    def _postprocess(
        self, hidden_states: Tensor, *args: object, labels: Selection | None = None, **kwargs: object
    ) -> Tensor:
        if not self.post_process:
            return GPTModel._postprocess(self, hidden_states, *args, labels=None, **kwargs)
        assert labels is not None, "a critic gives values of chosen positions"
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return self.value_head(hidden_states[:, 0].index_select(0, labels.positions)).float().t()
