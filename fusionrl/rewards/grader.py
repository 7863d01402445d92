"""`Grader`: a built-in reward, as one object in the file that defines it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Reward = float | dict[str, Any]


class CodeGrade(NamedTuple):
    """A reward in [0, 1] of a program, and how many tests failed for which of `code_run.REASONS`."""

    reward: float
    failures: dict[str, int]


@dataclass(frozen=True)
class Grader:
    """A reward of --rm-type. To add one, define it in a file of this room and name it in `registry.RM_TYPES`.

    grade             grade(response, label), or grade(response, label, metadata) with `reads_metadata`
    check             check(label), or check(label, metadata): raises ValueError where `grade` would, before a run
                      starts; None: any label will do
    reads_label       False: a problem that `check` finds is one of the metadata
    box_form          the form in which it gets the answer of a box, with boxed_ before its name
    package           module that it needs
    dict_key          it returns a dict, of which a weighted sum takes this number
    is_slow_to_check  reading one label takes up to milliseconds
    runs_programs     of the response, in the sandbox
    """

    grade: Callable[..., Reward | CodeGrade]
    check: Callable[..., object] | None = None
    reads_metadata: bool = False
    reads_label: bool = True
    box_form: str = "%s"
    package: str | None = None
    dict_key: str | None = None
    is_slow_to_check: bool = False
    runs_programs: bool = False

    def __call__(self, response: str, label: Any, metadata: Mapping[str, object] | None = None) -> Reward | CodeGrade:
        """Return the reward of a response. Raises ValueError if it cannot use the label or the metadata."""
        return self.grade(response, label, metadata or {}) if self.reads_metadata else self.grade(response, label)

    def check_row(self, label: object, metadata: Mapping[str, object]) -> None:
        """Raise ValueError where a row's label or metadata cannot be graded with."""
        if self.check is not None:
            self.check(label, metadata) if self.reads_metadata else self.check(label)
