"""Where two runs part: the first step, sample, token and metric in which their folders differ. Pure.

A step is compared in the order in which it came about: prompts, weight versions, log-probs and tokens, rewards, what
training found out about samples, metrics. The first of these that differs is the cause that a report names. Values
that differ between equal runs (times, memory, session ids) are left out.
"""

from __future__ import annotations

import filecmp
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fusionrl.base.wording import counted
from fusionrl.observe.formats import shorten, visible
from fusionrl.observe.glossary import entry_of
from fusionrl.observe.metrics import METRICS_FILE, RESERVED_KEYS, nonfinite_names, read_metrics
from fusionrl.observe.rollouts import EVAL_KIND, FAILED_KINDS, RolloutFile, as_ranges, list_rollouts

Row = Mapping[str, Any]  # of a file: of a sample, or the metrics of a step
Cause = Literal["data", "schedule", "engine", "generation", "reward", "sample", "rollout", "training", "push", "eval"]
# What a difference of each kind means; of a step's differences the first in this order is the cause.
MEANING: dict[Cause, str] = {
    "data": "the data: the same sample has another prompt or label (prompt file, order, filter)",
    "schedule": "the order of events in the pipeline: other groups, or tokens of other weight versions",
    "engine": "the engines' weights or numerics: the same tokens have other log-probs",
    "generation": "generation: the same prompts have other answers (seed, sampling, tools)",
    "reward": "the reward: the same answers have other rewards",
    "sample": "other fields of the same answers (masks, status, what your functions set)",
    "rollout": "the rollouts: without their samples in both folders no more is known",
    "training": "training: the same samples, other results",
    "push": "the weight push: the same training, other checks of the engines",
    "eval": "the evaluation: the same training, other results",
}
_ORDER = list(MEANING)
# Log-probs that differ by less (nats) may be those of another batch: then other answers come first.
_ROUNDING = 1e-4
_TIMED = ("perf/", "hardware/")
_SECTIONS: dict[str, Cause] = {"sync": "push", "eval": "eval", "rollout": "rollout", "pipeline": "schedule"}
_GRADED = ("reward", "baseline_reward")
_COMPARED = {"prompt", "prompt_tokens", "messages", "label", "rollout_log_probs", "weight_versions"}
_COMPARED |= {"response", "response_length", *_GRADED}
# Random names, and numbers of a group, by which samples are found.
_UNCOMPARED = {"session_id", "index", "group_index", "rollout_id"}
_METRICS_NAMED = 6


@dataclass
class Difference:
    """Where one kind of values of a step differs first, and in how many samples or metrics."""

    cause: Cause
    where: str
    count: int = 1
    noun: str = "sample"


@cache
def is_timed(name: str) -> bool:
    """Return whether a metric measures time or a machine, and so differs between equal runs."""
    entry = entry_of(name)
    return name.startswith(_TIMED) or (entry is not None and (entry.unit == "seconds" or entry.unit.endswith("/s")))


def first_difference(one: _Folder, other: _Folder) -> tuple[int, list[Difference]] | None:
    """Return the first step in which two runs differ, and its differences, the cause first; None if there is none.

    Steps that only one of them has are not compared.
    """
    rows, files = (one.rows, other.rows), (one.files, other.files)
    with_rows, with_files = rows[0].keys() & rows[1].keys(), files[0].keys() & files[1].keys()
    of_push: tuple[int, list[Difference]] | None = None
    kinds_of: defaultdict[int, list[str]] = defaultdict(list)
    for step, kind in sorted(with_files):
        kinds_of[step].append(kind)
    for step in sorted({*with_rows, *kinds_of}):
        kinds = kinds_of.get(step, [])
        found = [difference for kind in kinds for difference in compare_rollouts(*(side[step, kind] for side in files))]
        if step in with_rows:
            found += compare_metrics(rows[0][step], rows[1][step], has_samples="train" in kinds)
        found.sort(key=lambda difference: _ORDER.index(difference.cause))
        if any(difference.cause != "push" for difference in found):
            return step, found
        of_push = of_push or ((step, found) if found else None)
    return of_push  # a push is checked on a few sampled answers: other ones say little about what follows


def compared_steps(one: _Folder, other: _Folder) -> str:
    """Say which steps both runs have, and which only one of them has.

    Raises:
        ValueError: they have no step in common.
    """
    numbers = [{*run.rows, *(step for step, _ in run.files)} for run in (one, other)]
    both = numbers[0] & numbers[1]
    if not both:
        there = (
            f"{run.path} has {as_ranges(steps) or 'none'}" for run, steps in zip((one, other), numbers, strict=True)
        )
        raise ValueError(f"the runs have no step in common: {', '.join(there)}")
    text = f"steps {as_ranges(both)}"
    for run, steps in zip((one, other), numbers, strict=True):
        text += f"; only {run.path} has {as_ranges(steps - both)}" if steps - both else ""
    return text


class _Folder:
    """A run's metrics by step, and its files by step and kind; each is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = read_metrics(path) if (path / METRICS_FILE).is_file() else []
        self.rows: dict[int, Row] = {row["step"]: row for row in rows}
        files = (file for file in list_rollouts(path) if file.kind not in FAILED_KINDS)
        self.files = {(file.step, file.kind): file for file in files}


# ------------------------------------------------------------------------------------------------------------- samples
class _Found:
    """Collects differences: of each cause where it is first, and the number of samples."""

    def __init__(self) -> None:
        self.of: dict[Cause, Difference] = {}
        self.gap = 0.0  # the largest difference of two log-probs of the same token

    def add(self, cause: Cause, where: str) -> None:
        if cause in self.of:
            self.of[cause].count += 1
        else:
            self.of[cause] = Difference(cause, where)


def compare_rollouts(one: RolloutFile, other: RolloutFile) -> list[Difference]:
    """Return the differences between the samples of one step, one a cause; of trained samples also the trainers'
    values. Samples are paired by their index, or by their line where several have the same.
    """
    found = _Found()
    if not filecmp.cmp(one.path, other.path, shallow=False):
        for name, left, right in _pairs(one, other, found):
            _compare_samples(name, left, right, found)
    if not found.of:
        _compare_trained(one, other, found)
    if "engine" in found.of and found.gap:
        found.of["engine"].where += f"; the largest difference is {found.gap:.2g} nats"
        if found.gap < _ROUNDING and "generation" in found.of:  # another batch rounds otherwise
            found.of["generation"].where += f"; log-probs of equal tokens differ by at most {found.gap:.2g} nats"
            del found.of["engine"]
    if one.kind.startswith(EVAL_KIND):
        return [Difference("eval", f"{one.kind}: {d.where} ({MEANING[d.cause]})", d.count) for d in found.of.values()]
    return list(found.of.values())


def _pairs(one: RolloutFile, other: RolloutFile, found: _Found) -> Iterator[tuple[str, Row, Row]]:
    """Yield (name, sample, sample); note where the files do not have the same samples in the same order."""
    sides = [[(offset, row) for offset, row in file.scan() if row is not None] for file in (one, other)]
    keys = [[row.get("index") for _, row in side] for side in sides]
    if any(None in side or len(set(side)) < len(side) for side in keys):
        if len(sides[0]) != len(sides[1]):
            found.add("schedule", f"{len(sides[0])} samples, {len(sides[1])} samples")
        keys = [list(range(len(side))) for side in sides]
    elif keys[0] != keys[1]:
        line = first_unequal(*keys)
        places = (f"sample {side[line]}" if line < len(side) else "no sample" for side in keys)
        found.add("schedule", f"line {line}: {', '.join(places)}")
    offsets = dict(zip(keys[1], (offset for offset, _ in sides[1]), strict=True))
    for key, (offset, row) in zip(keys[0], sides[0], strict=True):
        if key in offsets:
            name = f"sample {row.get('index', key)} (group {row.get('group_index')})"
            yield name, one.row_at(offset), other.row_at(offsets[key])


def _compare_samples(name: str, one: Row, other: Row, found: _Found) -> None:
    answers = [_answer(row) for row in (one, other)]
    for field in ("prompt", "prompt_tokens", "label"):
        if one.get(field) != other.get(field):
            found.add("data", f"{name}: {field} {_short(one.get(field))}, {_short(other.get(field))}")
            return  # answers to different prompts do not compare
    parts = first_unequal(*answers)
    is_same = parts == len(answers[0]) == len(answers[1])
    versions = [_of_tokens(row, "weight_versions")[:parts] for row in (one, other)]
    if versions[0] != versions[1]:
        place = first_unequal(*versions)
        numbers = (_at(side, place) for side in versions)
        found.add("schedule", f"{name}, response token {place}: of weight version {', of '.join(numbers)}")
        return
    log_probs = [_of_tokens(row, "rollout_log_probs")[:parts] for row in (one, other)]
    if log_probs[0] != log_probs[1]:
        place = first_unequal(*log_probs)
        found.add("engine", f"{name}, response token {place}: log-prob {', '.join(_at(s, place) for s in log_probs)}")
        gaps = [abs(a - b) for a, b in zip(*log_probs, strict=False) if a is not None and b is not None]
        found.gap = max([found.gap, *gaps])
    if not is_same:
        tokens = (_at(side, parts) for side in answers)
        found.add("generation", f"{name}, response token {parts}: {', '.join(tokens)}")
        return
    for field in sorted(one.keys() | other.keys()):
        a, b = one.get(field), other.get(field)
        if a != b and field in _GRADED:
            found.add("reward", f"{name}: {field} {_short(a)}, {_short(b)}")
        elif a != b and field not in _COMPARED | _UNCOMPARED:
            found.add("sample", f"{name}: {field}{_place(a, b)}")


def _answer(row: Row) -> list[Any]:
    tokens, length = row.get("tokens"), row.get("response_length")
    if isinstance(tokens, list) and isinstance(length, int) and length:
        return tokens[-length:]
    return [] if isinstance(tokens, list) else [row.get("response")]


def _of_tokens(row: Row, field: str) -> list[Any]:
    values = row.get(field)
    return values if isinstance(values, list) else []


def _compare_trained(one: RolloutFile, other: RolloutFile, found: _Found) -> None:
    """Note where the trainers' values differ, of samples that both have trained on."""
    rows = one.scan_trained(), other.scan_trained()
    for line in sorted(rows[0].keys() & rows[1].keys()):
        left, right = one.trained_at(rows[0][line][0]), other.trained_at(rows[1][line][0])
        fields = [field for field in left if left[field] != right.get(field)]
        if fields:
            where = f"line {line} of {one.path.name}: {fields[0]}{_place(left[fields[0]], right.get(fields[0]))}"
            found.add("training", where)


# ------------------------------------------------------------------------------------------------------------- metrics
def compare_metrics(one: Row, other: Row, has_samples: bool) -> list[Difference]:
    """Return the differences between the metrics of one step, one a cause.

    has_samples  the samples were compared: a metric of the rollout that differs says nothing more about them
    """
    names: defaultdict[Cause, list[str]] = defaultdict(list)
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in RESERVED_KEYS and not _is_equal(name, one, other) and not is_timed(name):
            section = name.partition("/")[0]
            cause: Cause = "schedule" if has_samples and section == "rollout" else _SECTIONS.get(section, "training")
            names[cause].append(name)
    found = []
    for cause, differing in names.items():
        shown = (f"{name} {_shown(name, one)}, {_shown(name, other)}" for name in differing[:_METRICS_NAMED])
        more = f"; and {len(differing) - _METRICS_NAMED} more" if len(differing) > _METRICS_NAMED else ""
        found.append(Difference(cause, "; ".join(shown) + more, len(differing), "metric"))
    if has_samples:  # what a pipeline counts follows from times: it comes first only where samples differ
        last = [difference for difference in found if difference.cause == "schedule"]
        found = [difference for difference in found if difference.cause != "schedule"] or last
    return found


def _is_equal(name: str, one: Row, other: Row) -> bool:
    value = one.get(name)
    if value and type(value) is type(other.get(name)) and value == other[name]:
        return True  # nearly all; 0.0 and -0.0 are not
    is_there = name in one, name in other
    return all(is_there) and _shown(name, one) == _shown(name, other)


def _shown(name: str, row: Row) -> str:
    if name not in row:
        return "not reported"
    return "not finite" if name in nonfinite_names(row) else str(row[name])


# --------------------------------------------------------------------------------------------------------------- words
def first_unequal(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first place at which two sequences differ; the length of the shorter one where that begins both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _at(values: Sequence[object], place: int) -> str:
    return str(values[place]) if place < len(values) else "the end"


def _place(one: object, other: object) -> str:
    """Return where two values of a field differ first, and what they are there."""
    if isinstance(one, list) and isinstance(other, list):
        place = first_unequal(one, other)
        return f" of token {place}: {_at(one, place)}, {_at(other, place)}"
    return f" {_short(one)}, {_short(other)}"


def _short(value: object) -> str:
    return visible(shorten(value if isinstance(value, str) else repr(value), 80))


def difference_report(one: Path, other: Path) -> tuple[list[str], bool]:
    """Return the lines that say where two runs part, and whether they do.

    Raises:
        ValueError: they have no step in common.
    """
    folders = _Folder(one), _Folder(other)
    steps, found = compared_steps(*folders), first_difference(*folders)
    if found is None:
        return [f"equal in samples and metrics, times left out: {steps}"], False
    step, (first, *others) = found
    lines = [f"the runs part at step {step} ({steps})", f"first  {first.where}"]
    lines += [f"       in {counted(first.count, first.noun)}; values of {one} first, of {other} second"]
    lines += [f"cause  {MEANING[first.cause]}"]
    lines += [f"also   {later.where} (in {counted(later.count, later.noun)})" for later in others]
    return lines, True
