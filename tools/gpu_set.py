"""Run on the GPU requirement set what a machine without a GPU can: `scripts/test.sh --set gpu`.

    python tools/gpu_set.py [--only NAME,…] [--list] [--out DIR] [--limit-s SECONDS]

It runs with the Python of that set. Steps run one after the other, in processes of their own that see no GPU; each
has a folder with its output, and DIR/results.jsonl a line. The exit status is 1 if a step failed.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tools.gpu_set_imports import LAST_LINE
from tools.proof import machine
from tools.proof.records import summary, write_line
from tools.proof.stage import Failed, Figures, Result, Setting, Stage, run_stage

ROOT = Path(__file__).parents[1]


def _pytest(*arguments: str) -> Callable[[Setting], list[str]]:
    """Tests; those of seconds and of a GPU are left out."""

    def command(setting: Setting) -> list[str]:
        marks = ("-m", "not timed and not gpu", "-o", "faulthandler_timeout=900")
        return [sys.executable, "-m", "pytest", "-q", "-rs", "--durations=5", *marks, *arguments]

    return command


def _read_pytest(setting: Setting, code: int, output: str) -> Figures:
    last = (re.findall(r"^.*\b(?:passed|failed|error)\b.* in .*$", output, re.M) or [""])[-1].strip(" =")
    if code or " passed" not in last:
        raise Failed(f"pytest: {last or 'it said nothing'}")
    return {"pytest": last}


def _program(*arguments: str) -> Callable[[Setting], list[str]]:
    return lambda setting: [sys.executable, *arguments]


def _quickstart(setting: Setting) -> list[str]:
    return ["bash", "scripts/quickstart.sh", "1", str(setting.folder / "run")]


def _read_line(pattern: str) -> Callable[[Setting, int, str], Figures]:
    """The last line of the output with this pattern."""

    def read(setting: Setting, code: int, output: str) -> Figures:
        lines = [line for line in output.splitlines() if re.search(pattern, line)]
        if code or not lines:
            raise Failed(lines[-1] if lines else "the program failed")
        return {"it says": lines[-1].strip()}

    return read


STEPS = (
    Stage("imports", (), _program("tools/gpu_set_imports.py"), _read_line(LAST_LINE)),
    Stage("layers", (), _pytest("tests/trainer/test_te_layers.py"), _read_pytest),
    Stage("trainer", (), _pytest("tests/trainer"), _read_pytest),
    Stage("models", (), _pytest("tests/models"), _read_pytest),
    Stage("engines", (), _pytest("tests/engines"), _read_pytest),
    Stage("parity-one", (), _program("tools/parity.py", "--only", "llama TP 2"), _read_line(r"layouts|worst|\|")),
    Stage("parity", (), _program("tools/parity.py"), _read_line(r"layouts|worst|\|")),
    Stage("logits", (), _program("tools/parity.py", "--logits"), _read_line(r"logits|worst|\|")),
    Stage("quickstart", (), _quickstart, _read_line("accuracy")),
)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of steps, separated by commas")
    parser.add_argument("--list", action="store_true", help="name the steps")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-set", help="folder of the outputs")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds of a step")
    options = parser.parse_args(argv)
    names = [step.name for step in STEPS]
    chosen = options.only.split(",") if options.only else names
    if unknown := sorted(set(chosen) - set(names)):
        print(f"error: --only {','.join(unknown)}: unknown step; known: {', '.join(names)}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(names))
        return 0
    out: Path = options.out.absolute()
    facts = machine.facts(rehearses=True)
    print(f"Python {sys.version.split()[0]}; {facts['versions']}", flush=True)
    results = [_run_one(step, out, options.limit_s, facts) for step in STEPS if step.name in chosen]
    failed = [result.stage for result in results if result.status == "failed"]
    print(f"{len(results) - len(failed)} of {len(results)} steps passed; outputs: {out}")
    return int(bool(failed))


def _run_one(step: Stage, out: Path, limit_s: float, facts: dict[str, object]) -> Result:
    print(f"{step.name}: running, {out / step.name}", flush=True)
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(_paths())}
    result = run_stage(step, Setting(out / step.name, out, rehearses=True), limit_s, environ)
    write_line(out / "results.jsonl", result, facts)
    print(summary([result]), flush=True)
    return result


def _paths() -> list[str]:
    return [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
