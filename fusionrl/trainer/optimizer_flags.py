"""A resume's optimizer: the flags decide its learning rate and options, the checkpoint its position.

Rates, betas, epsilon and weight decay come back from a checkpoint with the optimizer's parameter groups. A run that is
extended, or resumed with another --lr, would keep those that it had before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusionrl.trainer.model import Trained

_STATE = ("params", "step")  # of a group; all else follows from flags


@dataclass(frozen=True)
class OptimizerFlags:
    """Options of each parameter group that follow from flags."""

    groups: list[dict[str, object]]

    @classmethod
    def of(cls, trained: Trained) -> OptimizerFlags:
        """Read them from a model whose optimizer was just built from flags."""
        groups = trained.optimizer.param_groups
        return cls([{name: value for name, value in group.items() if name not in _STATE} for group in groups])

    def restore(self, trained: Trained) -> None:
        """Put them back after a checkpoint was loaded. The number of steps made stays the checkpoint's."""
        for group, options in zip(trained.optimizer.param_groups, self.groups, strict=True):
            group.update(options)
        trained.scheduler.step(0)  # the rates of this position, by the schedule of the flags
