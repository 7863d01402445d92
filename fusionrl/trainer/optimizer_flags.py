"""A resume's optimizer: the flags decide its learning rate, schedule and options, the checkpoint its position.

Megatron restores both from a checkpoint: options of Adam come back with the optimizer's parameter groups, the schedule
with the scheduler. A run that was extended, or went on with another --lr, would go on with what it had before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusionrl.trainer.model import Trained

_STATE_OF_GROUP = ("params", "step")
_STATE_OF_SCHEDULER = ("optimizer", "num_steps")


@dataclass(frozen=True)
class OptimizerFlags:
    """Options that follow from flags: rates, betas, epsilon and weight decay of each parameter group; the schedule."""

    groups: list[dict[str, object]]
    schedule: dict[str, object]

    @classmethod
    def of(cls, trained: Trained) -> OptimizerFlags:
        """Read them from a model whose optimizer was just built from flags."""
        groups = [
            {name: value for name, value in group.items() if name not in _STATE_OF_GROUP}
            for group in trained.optimizer.param_groups
        ]
        schedule = {name: value for name, value in vars(trained.scheduler).items() if name not in _STATE_OF_SCHEDULER}
        return cls(groups, schedule)

    def restore(self, trained: Trained) -> None:
        """Put them back after a checkpoint was loaded. The number of steps made stays the checkpoint's."""
        for group, options in zip(trained.optimizer.param_groups, self.groups, strict=True):
            group.update(options)
        vars(trained.scheduler).update(self.schedule)
        trained.scheduler.step(0)  # the rates of this position
