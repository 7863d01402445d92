"""The glossary: every metric that a run reports, as the module that computes it declares it in its METRICS.

    METRICS = '''
    train/lr | rate | Learning rate of the last optimizer step.
    train/kl | nats | Mean over trained tokens of … | --kl-coef
    '''

A line has name, unit, meaning and, where it is not reported by every run, with what; lines that continue one are
indented. `<set>`, `<k>`, … in a name match any text; `{train,critic}/lr` declares both names. The declarations are read
from the source, so nothing is imported. After a change: `python -m fusionrl.cli metrics > docs/reference/metrics.md`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusionrl.observe.metrics import RESERVED_KEYS

_PACKAGE = Path(__file__).parents[1]
_DECLARED = re.compile(r'^METRICS = """\n(.*?)^"""$', re.MULTILINE | re.DOTALL)
_SAME = re.compile(r"\{(.*)\}(.*)")  # several beginnings of a name
_HOLE = re.compile(r"<\w+>")
# Section of the page → how names in it begin; the longest beginning counts.
SECTIONS = {
    "Rollouts": ("rollout/",),
    "Training": ("train/",),
    "Several adapters (`--lora-adapters`)": ("adapter/",),
    "Engine against trainer": ("train/logprob_",),
    "Critic (`--algorithm ppo`)": ("critic/",),
    "Process reward model (`--algorithm prime`)": ("prm/",),
    "Evaluations": ("eval/",),
    "Time and speed": ("perf/",),
    "Machines": ("hardware/", "perf/mfu", "perf/train_tokens", "perf/generate_tokens"),
    "Pipelines": ("pipeline/",),
    "Weight pushes": ("sync/", "train/lora_merge"),
    "Restarts": ("run/",),
}
# What the step line on the console and `fusionrl show` call a metric.
ON_THE_CONSOLE = {
    "mismatch": "train/logprob_diff_mean",
    "tok/s": "perf/tokens_per_s",
    "reward": "rollout/raw_reward",
    "acc": "rollout/accuracy",
    "loss": "train/loss",
    "stale": "rollout/staleness/token_mean",
}
_HEAD = """# Metrics

`fusionrl metrics NAME` prints the row of a metric. Each row is the declaration in the module that computes the metric
(`METRICS`); tests compare them with the code and with what whole runs report.

`metrics.jsonl` has a line for each step: `step` (the number of finished rollouts; 0 is before the first), `attempt`
(1, and one more for each `--resume`), `time` (seconds since 1970), the metrics below, and `nonfinite`, the names whose
value was NaN or infinite and is written as null. A step can have several lines; `read_metrics` of
`fusionrl.observe.metrics` merges them, and the attempts. [The run's folder](run-folder.md) has the other files.

A rollout can have several optimizer steps (`--num-steps-per-rollout`). A mean over tokens is then one over the tokens
of all these steps together, and a mean over samples one over all their samples. Tokens are those with a loss mask. A
name with `<…>` describes many metrics. The last column is the module under `fusionrl/` that computes the metric.

Your functions can report more: `metrics` of a rollout function's output, and under `train/` the metrics of a custom
loss (means over the optimizer steps), a custom policy loss or a correction (means over tokens).
"""


@dataclass(frozen=True)
class Entry:
    """A declared metric: `when`, flags or a mode that it needs; `source`, the module relative to fusionrl/."""

    section: str
    unit: str
    meaning: str
    when: str
    source: str


def _section_of(name: str) -> str:
    starts = [(len(start), title) for title, some in SECTIONS.items() for start in some if name.startswith(start)]
    assert starts, f"{name}: no section of the page takes a metric of this name; add it to SECTIONS"
    return max(starts)[1]


def declared(source: str, path: str) -> Iterator[tuple[str, Entry]]:
    """Yield (name, entry) for each metric that a module's text declares."""
    for block in _DECLARED.findall(source):
        for text in re.split(r"\n(?! )", block.strip()):
            name, *cells = " ".join(text.split()).split(" | ")
            assert len(cells) in (2, 3), f"{path}, METRICS: expected name | unit | meaning (| when), not {text!r}"
            starts, rest = found.groups() if (found := _SAME.fullmatch(name)) else ("", name)
            for full in (start + rest for start in starts.split(",")):
                yield full, Entry(_section_of(full), cells[0], cells[1], "".join(cells[2:]), path)


def read_glossary() -> dict[str, Entry]:
    """Return every declared metric by its name, in the order of the files."""
    entries: dict[str, Entry] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        for name, entry in declared(path.read_text(encoding="utf-8"), str(path.relative_to(_PACKAGE))):
            assert name not in entries, f"{name} is declared in {entries[name].source} and in {entry.source}"
            entries[name] = entry
    return entries


GLOSSARY = read_glossary()


def render_glossary() -> str:
    """Return docs/reference/metrics.md."""
    lines = [_HEAD]
    for section in SECTIONS:
        note = (
            "The metrics of the sections above are those of all adapters together.\n\n" if "adapter" in section else ""
        )
        lines.append(f"## {section}\n\n{note}| metric | unit | meaning | reported with | from |\n|---|---|---|---|---|")
        for name, entry in GLOSSARY.items():
            if entry.section == section:
                cells = (f"`{name}`", entry.unit, entry.meaning, entry.when, f"`{entry.source}`")
                lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def entry_of(name: str) -> Entry | None:
    """Return the entry that describes the metric `name`; an exact name goes before a pattern. None: there is none."""
    if name in GLOSSARY:
        return GLOSSARY[name]
    for pattern, entry in GLOSSARY.items():
        if "<" in pattern and re.fullmatch(".+".join(map(re.escape, _HOLE.split(pattern))), name):
            return entry
    return None


def undocumented(names: Iterable[str]) -> list[str]:
    """Return those of `names`, keys of a metrics line, that no module declares."""
    return sorted(name for name in set(names) - RESERVED_KEYS if entry_of(name) is None)


def main(names: Sequence[str]) -> int:
    """`fusionrl metrics [NAME…]`: print the page of all metrics as Markdown, or the entries that fit the names."""
    print("\n".join(map(describe, names)) if names else render_glossary(), end="")
    return 0


def describe(name: str) -> str:
    """Return the entries for `name`, or those whose names contain it, as plain text; ValueError if there are none."""
    name = ON_THE_CONSOLE.get(name, name)
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
