"""Labels of prompt data, read by the parsers of the built-in rewards that will grade with them: before a run starts."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fusionrl.data.findings import LabelProblem
from fusionrl.rewards.grader import Grader
from fusionrl.rewards.registry import REMOTE, RM_TYPES, parse_rm_type

BUDGET_S = 5.0


@dataclass
class LabelCheck:
    """Asks the reward of each row whether it can grade with the row's label and metadata.

    rm_type     --rm-type; a row's metadata may name another
    overrides   entries of the metadata that replace those of each row
    is_warning  a user's function may still give the samples other labels
    budget_s    seconds for labels that take long to read, counted down; what comes after them is not read
    """

    rm_type: str | None
    overrides: Mapping[str, object] | None = None
    is_warning: bool = False
    budget_s: float = BUDGET_S

    def __call__(self, label: object, metadata: Mapping[str, object]) -> LabelProblem | None:
        """Return the problem of a row's label or metadata; None for none."""
        metadata = {**metadata, **self.overrides} if self.overrides else metadata
        row_rm_type = metadata.get("rm_type")
        rm_type = row_rm_type or self.rm_type
        if not rm_type or rm_type == REMOTE:
            return None
        name = f"rm_type {row_rm_type} of the metadata" if row_rm_type else f"--rm-type {rm_type}"
        try:
            parts = parse_rm_type(str(rm_type))
        except ValueError as error:  # a wrong --rm-type is reported elsewhere
            return LabelProblem(name, str(error), False, self.is_warning) if row_rm_type else None
        for part in parts.values():
            grader = RM_TYPES.get(part.name)
            problem = None if grader is None else self._problem(grader, label, metadata)
            if grader is not None and problem is not None:
                return LabelProblem(name, problem, grader.reads_label, self.is_warning)
        return None

    def _problem(self, grader: Grader, label: object, metadata: Mapping[str, object]) -> str | None:
        if grader.is_slow_to_check and self.budget_s <= 0:
            return None
        since = time.monotonic()
        try:
            grader.check_row(label, metadata)
        except ValueError as error:
            return str(error).partition("--rm-type ")[2].partition(": ")[2] or str(error)
        finally:
            if grader.is_slow_to_check:
                self.budget_s -= time.monotonic() - since
        return None
