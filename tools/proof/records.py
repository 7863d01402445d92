"""Records of the proof: a JSON line a stage, and rows of docs/results/gpu-results.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.proof.stage import Result


def write_line(path: Path, result: Result, machine: Mapping[str, object]) -> None:
    """Append the result of a stage, with the machine that it is of."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result) | {"machine": dict(machine)}) + "\n")


def passed_before(path: Path, machine: Mapping[str, object]) -> set[str]:
    """Return the stages that have passed on such a machine, with the same sources.

    The last line of a stage counts; what other machines and sources gave, or was skipped, says nothing of it.
    """
    last: dict[str, bool] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the program was killed while it wrote
            continue
        if record["status"] != "skipped" and record["machine"] == dict(machine):
            last[record["stage"]] = record["status"] == "passed"
    return {name for name, is_passed in last.items() if is_passed}


def with_result(page: str, row: str, where: str, result: Result) -> str:
    """Return the page with the last two cells of the row that begins with `row` filled in.

    A row that a run has filled in is not overwritten by a machine that skips its stage.

    Raises:
        ValueError: not one row begins so.
    """
    lines = page.splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith(f"| {row}")]
    if len(places) != 1:
        raise ValueError(f"docs/results/gpu-results.md: {len(places)} rows begin with {row!r}")
    cells = lines[places[0]].split(" | ")
    if result.status == "skipped" and cells[-1].startswith(("passed", "failed")):
        return page
    text = _described(result).replace("|", "/")
    lines[places[0]] = " | ".join([*cells[:-2], where, f"{text} |"])
    return "\n".join(lines) + "\n"


def _described(result: Result) -> str:
    if result.status != "passed":
        return f"{result.status}: {result.why}"
    figures = [f"{name} {_short(value)}" for name, value in result.figures.items()]
    return f"passed in {result.seconds:.0f} s" + "".join(f"; {text}" for text in figures)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def summary(results: Sequence[Result]) -> str:
    """One line a stage, for the terminal."""
    return "\n".join(f"{result.status:<8}{result.stage:<20}{_described(result)}" for result in results)
