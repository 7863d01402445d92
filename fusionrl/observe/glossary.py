"""The glossary: every metric that a run reports, with unit, meaning and source; docs/reference/metrics.md shows it.

`<set>`, `<k>`, … in a name stand for any text. Metrics that a user's function reports under names of its own are not
in it.

To add a metric, add an entry to a table in `metric_entries/` and write the page again:
`fusionrl metrics > docs/reference/metrics.md`.
Tests compare the table with the code (tests/observe/test_glossary.py) and with what whole runs wrote
(tests/e2e/launch.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fusionrl.observe.metric_entries.entry import Entry, Table
from fusionrl.observe.metric_entries.hardware import HARDWARE
from fusionrl.observe.metric_entries.rollouts import EVALUATIONS, ROLLOUTS
from fusionrl.observe.metric_entries.run import PIPELINE, PUSHES, TIMES
from fusionrl.observe.metric_entries.training import CRITIC, ENGINE_AGAINST_TRAINER, EVERY_MODEL, POLICY, REWARD_MODEL
from fusionrl.observe.metrics import RESERVED_KEYS


def _with_prefix(prefix: str, *tables: Table) -> Table:
    return {f"{prefix}/{name}": entry for table in tables for name, entry in table.items()}


SECTIONS: dict[str, Table] = {
    "Rollouts": ROLLOUTS,
    "Training": _with_prefix("train", POLICY, EVERY_MODEL),
    "Engine against trainer": _with_prefix("train", ENGINE_AGAINST_TRAINER),
    "Critic (`--algorithm ppo`)": _with_prefix("critic", CRITIC, EVERY_MODEL),
    "Process reward model (`--algorithm prime`)": _with_prefix("prm", REWARD_MODEL, EVERY_MODEL),
    "Evaluations": EVALUATIONS,
    "Time and speed": TIMES,
    "Machines": HARDWARE,
    "Pipelines": PIPELINE,
    "Weight pushes": PUSHES,
}
GLOSSARY: Table = {name: entry for section in SECTIONS.values() for name, entry in section.items()}

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


_HEAD = """# Metrics

Made by `fusionrl metrics`; tests compare it with the code and with what whole runs report. `fusionrl metrics NAME`
prints one entry.

`metrics.jsonl` has a line for each step: `step` (the number of finished rollouts; 0 is before the first), `attempt`
(1, and one more for each `--resume`), `time` (seconds since 1970), the metrics below, and `nonfinite`, the names whose
value was NaN or infinite and is written as null. A step can have several lines; `read_metrics` of
`fusionrl.observe.metrics` merges them, and the attempts. [The run's folder](run-folder.md) has the other files.

A rollout can have several optimizer steps (`--num-steps-per-rollout`). A mean over tokens is then one over the tokens
of all these steps together, and a mean over samples one over all their samples. Tokens are those with a loss mask. A
name with `<…>` stands for many. The last column is the module under `fusionrl/` that computes the metric.

Functions of yours can report more: `metrics` of a rollout function's output, and under `train/` the metrics of a custom
loss (means over the optimizer steps), a custom policy loss or a correction (means over tokens).
"""


def render_glossary() -> str:
    """docs/reference/metrics.md."""
    parts = [_HEAD]
    for title, section in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| metric | unit | meaning | reported with | from |\n|---|---|---|---|---|\n")
        for name, entry in section.items():
            cells = (f"`{name}`", entry.unit, entry.meaning, entry.when, f"`{entry.source}`")
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


# What the step line on the console and `fusionrl show` call a metric.
_ON_THE_CONSOLE = {
    "mismatch": "train/logprob_diff_mean",
    "tok/s": "perf/tokens_per_s",
    "reward": "rollout/raw_reward",
    "acc": "rollout/accuracy",
    "loss": "train/loss",
    "stale": "rollout/staleness/token_mean",
}


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
