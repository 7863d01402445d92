"""Notes on the learning-rate schedule for the plan."""

from __future__ import annotations

from fusionrl.config.config import Config
from fusionrl.config.parts import changes_weights


def warm_up_notes(config: Config, num_steps: int) -> list[str]:
    """What the warm-up does to the first optimizer steps of a run of `num_steps`; nothing without one.

    Megatron's schedule has the rate `init + (lr - init) * k / n` at step k + 1 of a warm-up of n steps, so that with
    --lr-warmup-init 0 the first step changes nothing.
    """
    train = config.train
    count, start = train.lr_warmup_iters, min(train.lr_warmup_init, train.lr)
    if not count or not changes_weights(config):
        return []
    nothing = ", which changes no weights" if start == 0 else ""
    cure = " (--lr-warmup-init starts higher)" if start == 0 else ""
    notes = [f"learning rate {start:g} at optimizer step 1{nothing}, {train.lr:g} from step {count + 1} on{cure}"]
    if 0 < num_steps <= count:
        notes.append(
            f"--lr-warmup-iters {count}: all {num_steps} optimizer steps of the run are in the warm-up, and none has"
            f" --lr {train.lr:g}"
        )
    return notes
