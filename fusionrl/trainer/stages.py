"""The stages of a training step, and the value that passes between the first of them.

    pull        TrainShard, of which this rank may change the fields
    score       Prepared: log-probs of before the first step, as far as loss and advantages need them
    advantages  Prepared: everything that the loss needs
    pack        the micro-batches of each optimizer step, once the step before is taken
    steps       a StepReport for each; then the rollout's metrics

Hooks are called at the borders between the stages (`train_hooks.py`).
A critic and a process reward model have no advantages; their shards are prepared when they are pulled and scored.
"""

from dataclasses import dataclass, field

from torch import Tensor

from fusionrl.data.train_batch import TrainShard

# The experts that routers chose when they were recorded: samples of a micro-batch → [tokens, mixtures, topk].
Experts = dict[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Prepared:
    """A shard with columns that were added, the experts that were recorded, and metrics of its making (no prefix)."""

    shard: TrainShard
    experts: Experts = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
