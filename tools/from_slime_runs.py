"""Run the user-level functions of a checkout of slime, unchanged: two steps of a tiny model each, on the CPU.

    python tools/from_slime_runs.py --slime DIR [--only NAME] [--least N] [--keep DIR]

DIR may be a checkout of miles, a fork, too: it has cases of its own.

Each case is a `fusionrl train` of its own with two prompts of eight samples a rollout; a few functions that work
together (a generate function and its reward) share one. An example talks to a stub server of our
own, and packages that are not installed by the little that the example calls; nothing of the checkout is changed or
copied. A case passes if the run ends well, both steps trained on tokens with a finite loss, at least one of them with a
gradient, and the evidence is there that the functions did their work. One line a function: pass, fail or skip, with the
reason. Exits with 1 if fewer pass than --least.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from from_miles_cases import MILES_CASES
from from_slime_cases import CASES, Case, Outcome, Site
from from_slime_stubs import LONGEST, image_uri, write_model, write_packages

REPO = Path(__file__).resolve().parents[1]
TIMEOUT_S = 420.0
NO_END = 1_000  # in place of an exit code
NUM_STEPS = 2
LARGEST_DIFFERENCE = 1e-3  # of log-probs, engines to trainers
COMMON = (
    *("--mode", "rl", "--device", "cpu", "--num-rollout", str(NUM_STEPS), "--no-save", "--lr", "1e-3"),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "12"),
    *("--rollout-max-context-len", str(LONGEST)),
)
COLUMNS = ("--input-key", "prompt", "--label-key", "label")


def command_of(case: Case, site: Site, model: Path, more: list[str]) -> list[str]:
    """Return the command of a case; its data are written."""
    data = site.folder / "prompts.jsonl"
    row = case.row or {"prompt": "What is 3 + 4?", "label": "7"}
    rows = [json.dumps(row).replace("{number}", str(number)) for number in range(case.num_rows)]
    rows = [text.replace("{image}", image_uri(number)) if case.sees else text for number, text in enumerate(rows)]
    data.write_text("\n".join(rows) + "\n", encoding="utf-8")
    flags = [part.replace("{slime}", str(site.slime)).replace("{data}", str(data)) for part in case.flags]
    if case.config:
        path = site.folder / "custom.yaml"
        path.write_text(case.config.replace("{slime}", str(site.slime)), encoding="utf-8")
        flags += ["--custom-config-path", str(path)]
    columns = () if "--input-key" in flags else COLUMNS
    files = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--run-dir", str(site.folder / "run")]
    return [sys.executable, "-m", "fusionrl.cli", "train", *files, *COMMON, *columns, *flags, *more]


def run_case(case: Case, site: Site, model: Path) -> str:
    """Run a case; return why it failed, or nothing."""
    packages = site.folder / "packages"
    write_packages(packages, case.packages)
    paths = [str(packages), str(REPO), os.environ.get("PYTHONPATH", "")]
    site.env |= {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}
    log = site.folder / "output.txt"
    try:
        with case.server(site) if case.server else contextlib.nullcontext([]) as more:
            code = _run(command_of(case, site, model, more), site, log)
            counts = {name: count() for name, count in site.counts.items()}
    except OSError as error:  # a port that an example names is taken
        return f"its server could not start: {error}"
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        ended = f"no end after {TIMEOUT_S:.0f} s" if code == NO_END else f"exit code {code}"
        return f"{ended}: " + "\n          ".join(lines[-6:])
    return _judge(case, _outcome(site.folder / "run", counts))


def _run(command: list[str], site: Site, log: Path) -> int:
    process = subprocess.Popen(
        command,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env=os.environ | site.env,
        cwd=site.folder,  # not in the checkout, which would hide the names of slime that fusionrl has
        start_new_session=True,
    )
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return NO_END
    finally:  # also after Ctrl-C
        if process.poll() is None:
            process.terminate()  # the command ends its processes itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def _outcome(run_dir: Path, counts: dict[str, int]) -> Outcome:
    def rows(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    samples = [row for path in sorted((run_dir / "rollouts").glob("*.train.*.jsonl")) for row in rows(path)]
    return Outcome(rows(run_dir / "metrics.jsonl"), samples, counts)


def _judge(case: Case, outcome: Outcome) -> str:
    trained = [row for row in outcome.metrics if "train/loss" in row]
    problems = []
    if len(trained) != NUM_STEPS:
        problems.append(f"{len(trained)} steps instead of {NUM_STEPS}")
    if any(not math.isfinite(row["train/loss"]) or not row["train/num_tokens"] for row in trained):
        problems.append("a step without tokens, or without a finite loss")
    if not any(row.get("train/grad_norm", 0.0) > 0 for row in trained):
        problems.append("no step had a gradient, so nothing that the functions made was learned from")
    worst = max((row.get("train/logprob_diff_mean") or 0.0 for row in trained), default=0.0)
    if case.exact and worst > LARGEST_DIFFERENCE:
        problems.append(f"log-probs of engines and trainers differ by {worst:.2g}")
    problems += [f"no evidence: {words}" for words, holds in case.evidence if not holds(outcome)]
    return "; ".join(problems)


def main() -> int:
    """Run the cases; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slime", type=Path, required=True, metavar="DIR", help="a checkout of slime, or of miles")
    parser.add_argument("--only", action="append", metavar="NAME", help="a case; a wrong name lists them")
    parser.add_argument("--least", type=int, default=0, help="functions that must pass")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder to keep the runs in")
    options = parser.parse_args()
    root = options.slime.resolve()
    if not (root / "examples").is_dir():
        parser.error(f"--slime {root}: it has no folder examples; name the root of a checkout")
    cases = MILES_CASES if (root / "miles").is_dir() else CASES
    if unknown := set(options.only or ()) - {case.name for case in cases}:
        known = ", ".join(case.name for case in cases)
        parser.error(f"--only {' '.join(sorted(unknown))}: unknown case; known are {known}")
    for name in ("slime", "miles"):
        if importlib.util.find_spec(name) is not None:
            parser.error(f"{name} itself is installed, and would be run; use an environment without it")
    work = options.keep.resolve() if options.keep else Path(tempfile.mkdtemp(prefix="from-slime-"))
    chosen = [case for case in cases if not options.only or case.name in options.only]
    for sees in {case.sees for case in chosen if not case.skip}:
        if not _model(work, sees).is_dir():
            texts = [file.read_text(encoding="utf-8") for file in sorted((root / "examples").rglob("*.py"))]
            write_model(_model(work, sees), texts, sees=sees)
    counts = {"pass": 0, "fail": 0, "skip": 0}
    for case in chosen:
        counts[_report(case, root, work)] += len(case.functions)
    if not options.keep:
        shutil.rmtree(work, ignore_errors=True)
    totals = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    print(f"{counts['pass']} of {sum(counts.values())} functions run two steps ({totals})")
    return 0 if counts["pass"] >= options.least else 1


def _model(work: Path, sees: bool) -> Path:
    return work / ("model-that-sees" if sees else "model")


def _report(case: Case, root: Path, work: Path) -> str:
    """Run one case and print its lines; returns pass, fail or skip."""
    since, reason, verdict = time.monotonic(), case.skip, "skip"
    if not case.skip:
        folder = work / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        reason = run_case(case, Site(root, folder), _model(work, case.sees))
        verdict = "fail" if reason else "pass"
    notes = [f"{time.monotonic() - since:.0f} s"] if not case.skip else []
    if case.packages:
        names = sorted({name.partition("/")[0].removesuffix(".py") for name in case.packages})
        notes.append(f"with stand-ins for {', '.join(names)}")
    suffix = f" ({', '.join(notes)})" if notes else ""
    for function in case.functions:
        print(f"{verdict}  {function}{suffix}")
    if reason:
        print(f"      {reason}")
    sys.stdout.flush()
    return verdict


if __name__ == "__main__":
    sys.exit(main())
