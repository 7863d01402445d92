"""Labels of prompt data, read by the parsers of the built-in rewards that will grade with them: before a run starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fusionrl.data.findings import LabelProblem
from fusionrl.rewards.code_labels import read_tests
from fusionrl.rewards.gpqa import read_choices
from fusionrl.rewards.ifbench import instructions
from fusionrl.rewards.ifeval import followed
from fusionrl.rewards.math_utils import read_truth
from fusionrl.rewards.registry import REMOTE, parse_rm_type
from fusionrl.rewards.text_match import read_number_label, read_text

# Each raises ValueError for a label, or metadata, that its reward cannot grade with. Others need no label.
_READERS: dict[str, Callable[[Any, Any], object]] = {
    "exact": lambda label, _: read_text(label),
    "f1": lambda label, _: label == "" or read_text(label),  # empty: the question has no answer, as in SQuAD 2
    "dapo": lambda label, _: read_text(label),
    "math": lambda label, _: read_truth(label),
    "math_verify": lambda label, _: read_text(label),
    "last_number": lambda label, _: read_number_label(label),
    "math_verl": lambda label, _: read_truth(label),
    "deepscaler": lambda label, _: read_truth(label),
    "gpqa": read_choices,
    "ifeval": lambda _, metadata: followed("", metadata),
    "ifbench": lambda _, metadata: instructions(metadata),
    "code": lambda label, _: read_tests(label),
    "code_all": lambda label, _: read_tests(label),
}
_OF_METADATA = frozenset({"ifeval", "ifbench"})
_SLOW = frozenset({"ifeval", "code", "code_all"})  # reading one of their labels takes up to milliseconds
BUDGET_S = 5.0


class LabelCheck:
    """Asks the reward of each row whether it can grade with the row's label and metadata."""

    def __init__(
        self,
        rm_type: str | None,
        *,
        overrides: Mapping[str, object] | None = None,
        is_warning: bool = False,
        budget_s: float = BUDGET_S,
    ) -> None:
        """Prepare the check.

        Args:
            rm_type: --rm-type; a row's metadata may name another.
            overrides: entries of the metadata that replace those of each row.
            is_warning: a user's function may still give the samples other labels.
            budget_s: seconds for labels that take long to read; what comes after them is not read.
        """
        self._rm_type, self._overrides, self._is_warning = rm_type, dict(overrides or {}), is_warning
        self._left_s = budget_s

    def __call__(self, label: object, metadata: Mapping[str, object]) -> LabelProblem | None:
        """Return the problem of a row's label or metadata; None for none."""
        metadata = {**metadata, **self._overrides} if self._overrides else metadata
        row_rm_type = metadata.get("rm_type")
        rm_type = row_rm_type or self._rm_type
        if not rm_type or rm_type == REMOTE:
            return None
        name = f"rm_type {row_rm_type} of the metadata" if row_rm_type else f"--rm-type {rm_type}"
        try:
            parts = parse_rm_type(str(rm_type))
        except ValueError as error:  # a wrong --rm-type is reported elsewhere
            return LabelProblem(name, str(error), False, self._is_warning) if row_rm_type else None
        for part in parts.values():
            problem = self._told(part.name, label, metadata)
            if problem is not None:
                return LabelProblem(name, problem, part.name not in _OF_METADATA, self._is_warning)
        return None

    def _told(self, name: str, label: object, metadata: Mapping[str, object]) -> str | None:
        read = _READERS.get(name)
        if read is None or (name in _SLOW and self._left_s <= 0):
            return None
        since = time.monotonic() if name in _SLOW else 0.0
        try:
            read(label, metadata)
        except ValueError as error:
            return str(error).partition("--rm-type ")[2].partition(": ")[2] or str(error)
        finally:
            if name in _SLOW:
                self._left_s -= time.monotonic() - since
        return None
