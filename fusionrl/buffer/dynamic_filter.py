"""The dynamic sampling filter of a stream: what it refuses, counted over the run."""

from __future__ import annotations

from collections import Counter

from fusionrl.data.sample import Sample
from fusionrl.rollout.generate import GroupContext, apply_filter
from fusionrl.rollout.sglang_rollout import check_filter_keeps


class GroupFilter:
    """Asks --dynamic-sampling-filter-path."""

    def __init__(self, num_wanted: int) -> None:
        """`num_wanted`: groups of a batch."""
        self._num_wanted = num_wanted
        self._num_kept, self._refused = 0, Counter[str]()

    def refuses(self, context: GroupContext, samples: list[Sample]) -> str:
        """Return why it does not keep a group, "" where it does.

        Raises:
            HookError: it raised, or returned something else than a verdict.
            ValueError: it keeps next to nothing.
        """
        verdict = apply_filter(context.filter_path, context.samples.args, samples)
        if verdict.keep:
            self._num_kept += 1
            return ""
        reason = verdict.reason or "filtered"
        self._refused[reason] += 1
        check_filter_keeps(context.filter_path, self._num_kept, self._refused, self._num_wanted)
        return reason
