"""Names of `slime.rollout.filter_hub.base_types` and `slime.rollout.base_types` that call a user's function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fusionrl.rollout.types import (
    DynamicFilterOutput,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    as_eval_output,
    as_train_output,
)


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: object, **kwargs: object) -> DynamicFilterOutput:
    """Ask a filter about a group; a bare bool is accepted, and without a filter every group is kept."""
    verdict = DynamicFilterOutput(keep=True) if fn is None else fn(*args, **kwargs)
    return verdict if hasattr(verdict, "keep") else DynamicFilterOutput(keep=bool(verdict))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Return whether a group is dropped; one that is kept when there are too few stays where no spare group is left."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts the groups that a filter dropped, by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a dropped group; one without a reason is not counted."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return the counts as metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}


def call_rollout_fn(
    fn: Callable[..., Any], *args: object, evaluation: bool, **kwargs: object
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function; wrap bare lists and dicts in the output class."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    return as_eval_output(output) if evaluation else as_train_output(output)
