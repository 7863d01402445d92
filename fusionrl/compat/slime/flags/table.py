"""Every slime flag, and Megatron-LM flag in slime's launch scripts, that fusionrl does not have, from `flags.md`. Pure.

One entry per flag. Its kind says how it is treated:

SHAPE      config.json has this value: compared, and accepted silently if equal
RENAMED    replaced by another flag (`text`), which the user could pass instead
NO_EFFECT  accepted; the plan says why it changes nothing
REFUSED    an error, with the reason and what to do instead

A flag that fusionrl has needs no entry. DIFFERS lists those whose meaning or default differs. To add a flag, add a row
to `flags.md`, and copy the page to docs/reference/from-slime-flags.md.
"""

import enum
from pathlib import Path
from typing import NamedTuple

from fusionrl.base.wording import codes, table_rows
from fusionrl.config.aliases import cure_for
from fusionrl.config.hooks import flag_of


class Kind(enum.Enum):
    """How a flag is treated."""

    SHAPE = "compared"
    RENAMED = "renamed"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Entry(NamedTuple):
    """One flag.

    kind     how it is treated
    arity    number of values: 0, 1, 2, or -1 for all up to the next flag
    text     for people: the flag to write, or the reason
    neutral  values of a refused flag that match what fusionrl does: accepted, without effect
    """

    kind: Kind
    arity: int
    text: str
    neutral: tuple[str, ...] = ()

    def accept(self, name: str, values: list[str], accepted: dict[str, object]) -> str | None:
        """Put the flag `name` into `accepted` if it is compared or has no effect; otherwise return the error."""
        flag = flag_of(name)
        if len(values) < (1 if self.arity < 0 else self.arity):
            cure = cure_for(flag)
            return f"{flag}: it needs a value" + (f"; {cure}" if cure else "")
        text = " ".join([flag, *([] if name in SECRETS else values)])
        if self.kind is Kind.RENAMED:
            return f"{text}: slime's name; use {self.text}"
        if self.kind is Kind.REFUSED and not (self.neutral and values and values[0] in self.neutral):
            return f"{text}: {self.text}"
        if self.arity == 0 and values:
            if values[0].lower() == "true":
                values = []
            elif values[0].lower() == "false":
                return None
            else:
                return f"{text}: it takes no value"
        if name not in SECRETS:
            accepted[name] = values if self.arity < 0 else (values[0] if values else True)
        return None


PAGE = Path(__file__).with_name("flags.md").read_text(encoding="utf-8")
_ARITY = {"0": 0, "1": 1, "any": -1}  # by the column of values


def names_in(cell: str) -> list[str]:
    """Return the flags in a cell by their names: `--kl-coef` → `kl_coef`."""
    return [flag.removeprefix("--").replace("-", "_") for flag in codes(cell)]


def rows_of(title: str) -> list[list[str]]:
    """Return the rows of a section of the page."""
    rows = [cells for section, cells in table_rows(PAGE) if section == title]
    assert rows, f"flags.md has no rows under {title!r}"
    return rows


def _read(title: str, kind: Kind) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for flags, values, text, *neutral in rows_of(title):
        assert values in _ARITY, f"flags.md, {flags}: values {values!r}; it is one of {', '.join(_ARITY)}"
        entry = Entry(kind, _ARITY[values], text, tuple(codes("".join(neutral))))
        entries |= dict.fromkeys(names_in(flags), entry)
    return entries


SHAPES = _read("The model's shape (`MODEL_ARGS`)", Kind.SHAPE)
RENAMED = _read("Written as another flag", Kind.RENAMED)
NO_EFFECT = _read("Accepted, without effect", Kind.NO_EFFECT)
REFUSED = _read("Not here", Kind.REFUSED)
TABLE: dict[str, Entry] = SHAPES | RENAMED | NO_EFFECT | REFUSED
SECRETS = frozenset({"wandb_key"})  # neither shown nor kept

# What fusionrl does with a flag of the same name, where slime does something else.
DIFFERS = {name: text for flag, text in rows_of("Same name, different behaviour") for name in names_in(flag)}
