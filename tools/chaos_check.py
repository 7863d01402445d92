"""Check the folder of a run that was killed and resumed: each prompt is trained once, the bound holds, metrics fit.

Everything is read from what the run has saved (`rollouts/`, `metrics.jsonl`, `checkpoints/`) and compared with what the
run was to do (`Shape`). Each function returns its violations as sentences; no sentence, no violation.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusionrl.observe.rollouts import list_rollouts

LARGEST_DIFFERENCE = 1e-3  # of log-probs, engines to trainers, where no token is stale
_SHOWN = 4  # of prompts or samples that a sentence names

Row = Mapping[str, object]


@dataclass(frozen=True)
class Shape:
    """The task of a run."""

    prompts: tuple[str, ...]  # of the data, in the order in which the run draws them; all different
    num_steps: int
    groups_per_step: int
    samples_per_group: int
    max_staleness: int
    steps_per_push: int = 1
    refused: frozenset[str] = frozenset()  # prompts that the run's filter drops
    drops_late: bool = False  # groups that miss a deadline are dropped (--at-deadline drop)

    def __post_init__(self) -> None:
        """Refuse data in which a doubled prompt could not be seen, and too few of them."""
        assert len(set(self.prompts)) == len(self.prompts), "prompts must be different"
        assert len(self.wanted) >= self.num_steps * self.groups_per_step, "too few prompts"

    @property
    def wanted(self) -> list[str]:
        """The prompts that pass the filter, in order."""
        return [prompt for prompt in self.prompts if prompt not in self.refused]

    def version_before(self, step: int) -> int:
        """Return the number of pushes before the training of `step`."""
        return (step - 1) // self.steps_per_push


@dataclass
class Launch:
    """One attempt, as `metrics.jsonl` shows it."""

    first_step: int  # step of the checkpoint that it resumed from; 0 without one
    rows: list[dict[str, object]]  # its lines
    is_last: bool  # it ended by itself, with all steps


# ------------------------------------------------------------------------------------------------------------ reading
def trained_rows(run_dir: Path, last_step: int | None = None) -> dict[int, list[dict[str, object]]]:
    """Step → the samples that were trained in it; of a step that ran twice, those of the later attempt."""
    files = list_rollouts(run_dir, "train")
    return {file.step: list(file.rows()) for file in files if last_step is None or file.step <= last_step}


def metric_lines(run_dir: Path) -> tuple[list[dict[str, object]], int]:
    """Return the lines of metrics.jsonl as they are, and how many could not be read (torn by a kill)."""
    path = run_dir / "metrics.jsonl"
    rows, num_torn = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            num_torn += 1
    return rows, num_torn


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest published checkpoint; 0 without one."""
    paths = (run_dir / "checkpoints").glob("step_*/manifest.json")
    return max((int(match[1]) for path in paths if (match := re.fullmatch(r"step_(\d+)", path.parent.name))), default=0)


def leftovers(run_dir: Path) -> list[str]:
    """Name half-written files that a finished run has left in its folder."""
    paths = [*run_dir.glob("checkpoints/.writing_*"), *run_dir.glob("rollouts/**/.*.tmp"), *run_dir.glob("weights/*")]
    return [str(path.relative_to(run_dir)) for path in sorted(paths)]


# ----------------------------------------------------------------------------------------------------------- checking
def check_prompts(shape: Shape, steps: Mapping[int, Sequence[Row]], *, num_dropped: int = 0) -> list[str]:
    """Check a run that has ended: the trained groups are the data's first prompts, each once; none is left out.

    num_dropped  groups that missed their deadline; only with `drops_late` may as many be missing
    """
    missing_steps = sorted(set(range(1, shape.num_steps + 1)) - set(steps))
    violations = [f"steps without samples: {_some(missing_steps)}"] if missing_steps else []
    violations += check_doubled(shape, steps)
    trained = set(_prompts(steps))
    expected = shape.wanted
    places = [place for place, prompt in enumerate(expected) if prompt in trained]
    lost = [prompt for prompt in expected[: max(places, default=-1) + 1] if prompt not in trained]
    if len(lost) > (num_dropped if shape.drops_late else 0):
        dropped = f", but {num_dropped} groups were dropped" if shape.drops_late else ""
        violations.append(f"{len(lost)} prompts lost{dropped}: {_some(lost)}")
    return violations


def check_doubled(shape: Shape, steps: Mapping[int, Sequence[Row]]) -> list[str]:
    """Check steps of a run that may resume: whole groups, each prompt and each sample once, none from elsewhere."""
    violations = []
    for step, rows in sorted(steps.items()):
        groups: dict[object, list[Row]] = {}
        for row in rows:
            groups.setdefault(row["group_index"], []).append(row)
        sizes = [len(group) for group in groups.values()]
        if sizes != [shape.samples_per_group] * shape.groups_per_step:
            expected = f"{shape.groups_per_step} groups of {shape.samples_per_group}"
            violations.append(f"step {step} has groups of {sizes} samples, not {expected}")
        if mixed := [index for index, group in groups.items() if len({row["prompt"] for row in group}) > 1]:
            violations.append(f"step {step}: samples of different prompts in group {_some(mixed)}")
    prompts = _prompts(steps)
    violations += [f"{unit} trained twice: {_some(repeated)}" for unit, repeated in _twice(steps, prompts) if repeated]
    if refused := [prompt for prompt in prompts if prompt in shape.refused]:
        violations.append(f"prompts trained that the filter drops: {_some(refused)}")
    if strange := sorted(set(prompts) - set(shape.prompts)):
        violations.append(f"prompts trained that are not in the data: {_some(strange)}")
    return violations


def _twice(steps: Mapping[int, Sequence[Row]], prompts: Sequence[str]) -> list[tuple[str, list[object]]]:
    samples = Counter(row["index"] for rows in steps.values() for row in rows)
    return [
        ("prompts", [prompt for prompt, count in Counter(prompts).items() if count > 1]),
        ("samples", [index for index, count in samples.items() if count > 1]),
    ]


def _prompts(steps: Mapping[int, Sequence[Row]]) -> list[str]:
    """List the prompt of each group."""
    return [
        prompt
        for _, rows in sorted(steps.items())
        for _, prompt in dict.fromkeys((row["group_index"], str(row["prompt"])) for row in rows)
    ]


def check_bound(shape: Shape, steps: Mapping[int, Sequence[Row]]) -> list[str]:
    """Check that each trained token is at most `max_staleness` pushes older than the weights that train it."""
    violations = []
    for step, rows in sorted(steps.items()):
        for row in rows:
            versions = row.get("weight_versions")
            if not isinstance(versions, list) or len(versions) != row["response_length"]:
                violations.append(f"step {step}, sample {row['index']}: not one weight version a token")
                continue
            ages = [shape.version_before(step) - int(version) // shape.steps_per_push for version in versions]
            if any(version < 0 for version in versions):
                violations.append(f"step {step}, sample {row['index']}: a token of unknown weights")
            elif any(version >= step for version in versions):
                violations.append(f"step {step}, sample {row['index']}: a token of version {max(versions)}, from later")
            elif max(ages, default=0) > shape.max_staleness:
                violations.append(
                    f"step {step}, sample {row['index']}: a token is {max(ages)} pushes old, the bound is"
                    f" {shape.max_staleness}"
                )
    return violations


def largest_age(shape: Shape, steps: Mapping[int, Sequence[Row]]) -> int:
    """Return the staleness of the oldest trained token, in pushes."""
    ages = (
        shape.version_before(step) - int(version) // shape.steps_per_push
        for step, rows in steps.items()
        for row in rows
        for version in row.get("weight_versions") or ()  # type: ignore[attr-defined]
    )
    return max(ages, default=0)


def check_metrics(shape: Shape, launches: Sequence[Launch]) -> list[str]:
    """Check the lines of all attempts: each resumes from its checkpoint, has each step once, and versions go up."""
    violations = []
    numbers: list[object] = []
    for place, launch in enumerate(launches, start=1):
        if not launch.rows:
            violations += [f"start {place} ended well without a line of metrics"] if launch.is_last else []
            continue
        attempts = {row["attempt"] for row in launch.rows}
        if len(attempts) > 1 or (numbers and min(attempts) <= max(numbers)):  # type: ignore[type-var]
            violations.append(f"start {place} writes as attempt {_some(sorted(map(str, attempts)))}, after {numbers}")
        numbers += attempts
        steps = [row["step"] for row in launch.rows]
        if steps != list(range(launch.first_step, launch.first_step + len(steps))):
            violations.append(f"start {place} goes on from step {launch.first_step}, but its lines are of {steps}")
        if launch.is_last and steps[-1] != shape.num_steps:
            violations.append(f"start {place} ended well after step {steps[-1]} of {shape.num_steps}")
        versions = [row["sync/version"] for row in launch.rows if "sync/version" in row]
        if versions != sorted(set(versions)):  # type: ignore[type-var]
            violations.append(f"start {place}: versions do not go up: {versions}")
        violations += _check_values(shape, launch.rows, place)
    return violations


def _check_values(shape: Shape, rows: Iterable[Row], place: int) -> list[str]:
    violations = []
    for row in rows:
        where = f"start {place}, step {row['step']}"
        if row.get("nonfinite"):
            violations.append(f"{where}: not finite: {row['nonfinite']}")
        age = row.get("rollout/staleness/token_max", 0)
        if isinstance(age, int | float) and age > shape.max_staleness * shape.steps_per_push:
            violations.append(f"{where}: rollout/staleness/token_max is {age:g}")
        gap = row.get("train/logprob_diff_max") if age == 0 else None
        if isinstance(gap, int | float) and gap > LARGEST_DIFFERENCE:
            violations.append(f"{where}: log-probs of engine and trainer differ by {gap:.2g}: other weights sampled")
    return violations


def num_dropped_late(rows: Iterable[Row]) -> int:
    """Groups that missed a deadline, over the lines that count: of each step the last one."""
    last = {row["step"]: row for row in rows}
    return sum(int(row.get("rollout/dropped_deadline", 0)) for row in last.values())  # type: ignore[call-overload]


def _some(items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
