"""The glossary: every metric that a run reports, with unit, meaning and source, from the table in `glossary.md`.

`<set>`, `<k>`, … in a name stand for any text. Metrics that a user's function reports under names of its own are not
in it.

To add a metric, add a row to `glossary.md`, then write the page again: `fusionrl metrics > docs/reference/metrics.md`.
Tests compare the table with the code (tests/observe/test_glossary.py) and with what whole runs wrote
(tests/e2e/launch.py).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusionrl.base.wording import table_rows
from fusionrl.observe.metrics import RESERVED_KEYS


@dataclass(frozen=True)
class Entry:
    """A row of the table: `when`, flags or a mode that it needs; `source`, the module relative to fusionrl/."""

    section: str
    unit: str
    meaning: str
    when: str
    source: str


def render_glossary() -> str:
    """docs/reference/metrics.md."""
    return Path(__file__).with_suffix(".md").read_text(encoding="utf-8")


def _read(page: str) -> dict[str, Entry]:
    return {
        name.strip("`"): Entry(section, unit, meaning, when, source.strip("`"))
        for section, (name, unit, meaning, when, source) in table_rows(page)
    }


GLOSSARY = _read(render_glossary())

_HOLE = re.compile(r"<\w+>")


def entry_of(name: str) -> Entry | None:
    """The entry that describes the metric `name`; an exact name goes before a pattern. None if there is none."""
    if name in GLOSSARY:
        return GLOSSARY[name]
    return next((GLOSSARY[pattern] for pattern in GLOSSARY if _fits(pattern, name)), None)


def _fits(pattern: str, name: str) -> bool:
    parts = map(re.escape, _HOLE.split(pattern))
    return "<" in pattern and re.fullmatch(".+".join(parts), name) is not None


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of `names`, keys of a metrics line, that no entry describes."""
    return sorted(name for name in set(names) - RESERVED_KEYS if entry_of(name) is None)


# What the step line on the console and `fusionrl show` call a metric.
_ON_THE_CONSOLE = {
    "mismatch": "train/logprob_diff_mean",
    "tok/s": "perf/tokens_per_s",
    "reward": "rollout/raw_reward",
    "acc": "rollout/accuracy",
    "loss": "train/loss",
    "stale": "rollout/staleness/token_mean",
}


def main(names: Sequence[str]) -> int:
    """`fusionrl metrics [NAME…]`: print the page of all metrics as Markdown, or the entries that fit the names."""
    print("\n".join(map(describe, names)) if names else render_glossary(), end="")
    return 0


def describe(name: str) -> str:
    """The entries for `name`, or those whose names contain it, as plain text.

    Raises:
        ValueError: there is none.
    """
    name = _ON_THE_CONSOLE.get(name, name)
    exact = entry_of(name)
    entries = {name: exact} if exact else {key: entry for key, entry in GLOSSARY.items() if name in key}
    if not entries:
        raise ValueError(f"no metric is called {name!r}, and no name contains it; `fusionrl metrics` prints all")
    lines = []
    for key, entry in entries.items():
        facts = [f"unit: {entry.unit}"] if entry.unit else []
        facts += [f"reported with: {entry.when}"] if entry.when else []
        lines += [key, f"  {entry.meaning}", f"  {'; '.join([*facts, f'from: fusionrl/{entry.source}'])}"]
    return "\n".join(lines) + "\n"
