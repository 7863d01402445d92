"""Run one command twice with --bitwise, and count the metrics that differ, times left out.

    python -m tools.proof.repeats FOLDER COMMAND…

COMMAND is a `fusionrl train` without --run-dir: that is FOLDER/first, then FOLDER/second. FOLDER/repeats.json gets
the figures. Exit code 1 if a run fails; metrics that differ are a figure, and no failure.
"""

import json
import subprocess
import sys
from pathlib import Path

from fusionrl.observe.metrics import RESERVED_KEYS
from fusionrl.observe.run_differences import is_timed


def values_of(run: Path) -> dict[str, object]:
    """Return the metrics of a run but for times and what a machine measures, each by its step and name."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        f"step {row['step']} {name}": value
        for row in rows
        for name, value in row.items()
        if name not in RESERVED_KEYS and not is_timed(name)
    }


def compare(first: Path, second: Path) -> dict[str, object]:
    """Return how many metrics two runs have, how many of them differ and which is the first, and the mismatch left."""
    one, other = values_of(first), values_of(second)
    names = list(one | other)
    differing = [name for name in names if one.get(name) != other.get(name)]
    apart = [value for name, value in one.items() if name.endswith("train/logprob_diff_mean")]
    return {
        "metrics": len(names),
        "differ in the second run": len(differing),
        "the first of these": differing[0] if differing else "none",
        "log-probs of engine and trainer differ by": max(map(float, apart)),  # type: ignore[arg-type]
    }


def main(argv: list[str]) -> int:
    """Command line."""
    folder, command = Path(argv[0]), argv[1:]
    runs = folder / "first", folder / "second"
    for run in runs:
        if code := subprocess.run([*command, "--bitwise", "--run-dir", str(run)], check=False).returncode:
            return code
    (folder / "repeats.json").write_text(json.dumps(compare(*runs)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
