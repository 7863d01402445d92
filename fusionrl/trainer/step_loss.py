"""The loss of one optimizer step, as the forward pass calls it: the built-in one, or a user's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusionrl.config.hooks import HookError
from fusionrl.trainer.custom_loss import CustomLoss
from fusionrl.trainer.loss import LossOptions, LossSums, micro_batch_loss
from fusionrl.trainer.loss_hooks import LossHooks
from fusionrl.trainer.packed_batch import MicroBatch


@dataclass(frozen=True)
class StepLoss:
    """A loss function as Megatron calls it: (micro-batch, output of the model) → (loss, count, sums).

    options  choose the built-in loss
    compare  report how far the engine's log-probs are off: only while the weights are those of the rollout
    custom   replaces the built-in losses
    hooks    a user's functions within them
    keeps_scores  the sums hold log-probs and entropies of tokens
    """

    options: LossOptions
    compare: bool = False
    custom: CustomLoss | None = None
    hooks: LossHooks | None = None
    keeps_scores: bool = False

    @property
    def wants_logits(self) -> bool:
        """Return whether it is given logits instead of log-probs."""
        return self.custom is not None

    @property
    def names_may_differ(self) -> bool:
        """Return whether ranks may report different metrics: a user's function decides by what it sees."""
        has_own_loss = self.options.custom_policy_loss_path is not None
        return self.custom is not None or self.hooks is not None or has_own_loss

    def __call__(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, LossSums]:
        """Return the micro-batch's loss; a HookError gets the samples of the micro-batch."""
        try:
            if self.custom is not None:
                value, sums = self.custom(batch, output)
            else:
                # A critic gives values alone.
                value, sums = micro_batch_loss(output[0], output[-1], batch, self.options, self.compare, self.hooks)
                if self.keeps_scores:
                    sums.scores = output.detach()
        except HookError as error:
            error.positions = list(batch.samples)
            raise
        # The loss is divided already (`step.py`), but without a count Megatron divides by the micro-batches.
        return value, torch.zeros((), dtype=torch.int, device=output.device), sums
