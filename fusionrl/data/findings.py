"""Findings about rows, grouped by cause: one line a cause, with the number of rows and the first three of them."""

from dataclasses import dataclass, field
from typing import NamedTuple

NUM_PLACES = 3
MAX_CAUSES = 20


@dataclass(frozen=True)
class Finding:
    """One thing about one row."""

    cause: str  # the same text for every row that has it
    detail: str = ""  # more about this row
    hint: str = ""  # what to do about it
    is_warning: bool = False  # the row can be trained on as it is

    def __str__(self) -> str:
        return self.cause + (f" ({self.detail})" if self.detail else "") + (f"; {self.hint}" if self.hint else "")


class FindingError(ValueError):
    """A mistake in a row, by its cause: rows with the same one are reported together."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class LabelProblem(NamedTuple):
    """The reason why a reward cannot grade with a row."""

    reward: str  # which one, as people name it
    reason: str  # why it cannot, in the reward's own words
    is_about_label: bool = True  # False: it is about the metadata
    is_warning: bool = False  # the row may be trained on all the same


@dataclass
class _Group:
    first: Finding
    places: list[str] = field(default_factory=list)
    count: int = 0


class Findings:
    """Findings in the rows of one set, whose name `where` begins each text.

    failures  what ended its reading; remarks: warnings about the set as a whole
    """

    def __init__(self, where: str) -> None:
        self.num_rows = 0
        self.failures: list[str] = []
        self.remarks: list[str] = []
        self._where = where
        self._groups: dict[tuple[str, bool], _Group] = {}

    def add(self, place: str, finding: Finding) -> None:
        """`place` is `line 3` or `row 3`."""
        group = self._groups.setdefault((finding.cause, finding.is_warning), _Group(finding))
        group.count += 1
        if len(group.places) < NUM_PLACES:
            group.places.append(place)

    @property
    def errors(self) -> list[str]:
        """One text a cause for which rows cannot be trained on."""
        return self._texts(is_warning=False) + self.failures

    @property
    def warnings(self) -> list[str]:
        """One text a cause that rows can be trained on with."""
        return self._texts(is_warning=True) + self.remarks

    def _texts(self, is_warning: bool) -> list[str]:
        groups = [group for group in self._groups.values() if group.first.is_warning == is_warning]
        more = [f"and {len(groups) - MAX_CAUSES:,} more causes"] if len(groups) > MAX_CAUSES else []
        return [f"{self._where}: {text}" for text in (*map(self._text, groups[:MAX_CAUSES]), *more)]

    def _text(self, group: _Group) -> str:
        first = group.first
        if group.count == 1:
            return f"{group.places[0]}: {first}"
        more = ", …" if group.count > len(group.places) else ""
        word = group.places[0].partition(" ")[0]  # `line 1`, `line 2` → `lines 1, 2`
        places = ", ".join(place.partition(" ")[2] for place in group.places)
        text = f"{first.cause} in {group.count:,} of {self.num_rows:,} rows ({word}s {places}{more}"
        text += f"; {group.places[0]}: {first.detail})" if first.detail else ")"
        return text + (f"; {first.hint}" if first.hint else "")
