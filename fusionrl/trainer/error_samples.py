"""Errors of a user's code in a trainer name the samples that it was at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusionrl.config.hooks import HookError, user_code
from fusionrl.data.train_batch import TrainShard
from fusionrl.observe.rollouts import list_rollouts

MAX_NAMED = 16  # samples in a message


@contextmanager
def naming_samples(run_dir: str, shard: TrainShard, rollout_id: int) -> Iterator[None]:
    """Name the samples at which a user's function raised, and the file of the run that has them.

    Covers user code that is not called as a hook, too, such as the forward pass of a model.
    """
    try:
        with user_code("a user's code in a trainer", None, only_theirs=True):
            yield
    except HookError as error:
        if error.positions is not None:
            indices = [str(int(shard.fields["sample_index"][position])) for position in error.positions]
            files = [
                rollout.path for rollout in list_rollouts(Path(run_dir), "train") if rollout.rollout_id == rollout_id
            ]
            listing = ", ".join(indices[:MAX_NAMED]) + (", …" if len(indices) > MAX_NAMED else "")
            error.add(f"the samples that it was at: {listing}" + (f", in {files[-1]}" if files else ""))
        raise
