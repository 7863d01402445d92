"""`PastEvaluations`: which evaluations beside training a run's folder has results of, for a resume."""

from __future__ import annotations

import json
from pathlib import Path

from fusionrl.observe.metrics import METRICS_FILE, STEP_TIME, read_metrics

_WAS_DUE = "perf/time_wait_eval_s"  # in the row of a step that engines of an evaluation got the weights of


class PastEvaluations:
    """What metrics.jsonl and eval/ of a run's earlier attempts say.

    An attempt that was resumed from an earlier checkpoint trains its steps again: other weights, and a result of the
    attempt before is not theirs. The last attempt that trained a step has made the weights that count.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "eval"
        rows = read_metrics(run_dir, of_rows_with=STEP_TIME) if (run_dir / METRICS_FILE).exists() else []
        self._steps = {int(row["step"]): row for row in rows}

    def was_due(self, step: int) -> bool:
        """Return whether the attempt that trained `step` gave engines its weights to evaluate them."""
        return _WAS_DUE in self._steps.get(step, {})

    def last_begun(self, before: int) -> int | None:
        """Return the last trained step before `before` that was due."""
        return max((step for step in self._steps if step < before and self.was_due(step)), default=None)

    def has_result(self, step: int) -> bool:
        """Return whether eval/<step>.json is of the weights that the last attempt at `step` has trained, or later."""
        try:
            found = json.loads((self._folder / f"{step}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        attempt = found.get("attempt") if isinstance(found, dict) else None
        return isinstance(attempt, int) and attempt >= int(self._steps.get(step, {}).get("attempt", 0))
