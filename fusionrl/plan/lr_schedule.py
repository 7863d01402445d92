"""The learning rate's schedule: its length, what its warm-up does, and whether Megatron's scheduler takes it. Pure."""

from fusionrl.config.config import Config
from fusionrl.config.model import TrainGroup
from fusionrl.config.run_parts import changes_weights


def warm_up_notes(config: Config, num_steps: int) -> list[str]:
    """Describe the effect of the warm-up on the first optimizer steps of a run of `num_steps`; nothing without one.

    Megatron's schedule has the rate `init + (lr - init) * k / n` at step k + 1 of a warm-up of n steps, so that with
    --lr-warmup-init 0 the first step changes nothing.
    """
    train = config.train
    count, start = warm_up_steps(train, num_steps), min(train.lr_warmup_init, train.lr)
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


def warm_up_steps(train: TrainGroup, num_steps: int | None) -> int:
    """Return the optimizer steps of the warm-up; `num_steps`: of the whole run."""
    if train.lr_warmup_fraction is None:
        return train.lr_warmup_iters
    steps = train.lr_decay_iters or num_steps
    if steps is None:
        raise ValueError(
            f"--lr-warmup-fraction {train.lr_warmup_fraction:g}: the length of the run is not known; give"
            " --lr-decay-iters, or --lr-warmup-iters"
        )
    return int(train.lr_warmup_fraction * steps)


def lr_decay_steps(train: TrainGroup, num_steps: int | None = None, prefix: str = "") -> int:
    """Optimizer steps over which the learning rate decays; `num_steps`: of the whole run, None: not known.

    `prefix`: of the flags of a critic or a prm ("critic-", "prm-"), for the message.
    """
    steps = train.lr_decay_iters or num_steps
    if train.lr_decay_style == "constant":
        return max(steps or 1, warm_up_steps(train, num_steps) + 1)
    if steps is None:
        raise ValueError(
            f"--lr-decay-style {train.lr_decay_style}: the length of the run is not known; give --lr-decay-iters"
        )
    if train.lr_warmup_fraction is None and steps <= train.lr_warmup_iters:
        raise ValueError(
            f"--{prefix}lr-warmup-iters {train.lr_warmup_iters} is not below the {steps} steps of the decay; "
            "lower it, or raise --lr-decay-iters"
        )
    return steps
