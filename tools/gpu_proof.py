"""Show on this machine's GPUs what docs/results/gpu-results.md lists, and fill in that page.

    python tools/gpu_proof.py [--only NAME,…] [--again] [--list] [--out DIR] [--limit-s SECONDS]
    python tools/gpu_proof.py --rehearse        # on a CPU, at tiny sizes: it tests this program

Stages run one after the other, the most valuable first, each in processes of its own for at most two minutes; those
with a published model take longer, and want the folders that FUSIONRL_PROOF_MODEL and FUSIONRL_PROOF_DATA name. After
each, DIR/results.jsonl has a line and the page its rows; a rehearsal writes to a copy of the page, DIR/gpu-results.md.
A stage that has passed on this machine with these sources is not run again without --again. What the machine cannot
run is named, with the reason. The exit status is 1 if a stage failed.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from tools.proof import machine, tasks
from tools.proof.records import passed_before, summary, with_result, write_line
from tools.proof.stage import Result, Setting, Stage, missing, run_stage
from tools.proof.stages import STAGES, of_names

PAGE = machine.ROOT / "docs" / "results" / "gpu-results.md"


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at tiny sizes")
    parser.add_argument("--only", help="names of stages, separated by commas")
    parser.add_argument("--again", action="store_true", help="also stages that have passed")
    parser.add_argument("--list", action="store_true", help="name the stages and the rows that they fill in")
    parser.add_argument("--out", type=Path, default=machine.ROOT / "runs" / "gpu-proof", help="folder of the results")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds of a stage")
    options = parser.parse_args(argv)
    if options.list:
        for stage in STAGES:
            print(f"{stage.name:<20}{'; '.join(stage.rows)}")
        return 0
    try:
        stages = of_names(options.only)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    num_gpus = 0 if options.rehearse else machine.count_gpus()
    if not num_gpus and not options.rehearse:
        print("error: this machine shows no NVIDIA GPU; --rehearse runs the stages on a CPU", file=sys.stderr)
        return 2
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    facts = machine.facts(options.rehearse)
    print(f"{machine.described(facts)}; {facts['versions']}", flush=True)
    done = set() if options.again else passed_before(out / "results.jsonl", facts)
    tasks.make_task(out / "task")
    results = []
    for stage in stages:
        if stage.name in done:
            print(f"{stage.name}: has passed before", flush=True)
            continue
        results.append(_run_one(stage, out, options.rehearse, options.limit_s, num_gpus))
        write_line(out / "results.jsonl", results[-1], facts)
        _fill_in(stage, results[-1], out, machine.described(facts), options.rehearse)
        print(summary(results[-1:]), flush=True)
    return int(any(result.status == "failed" for result in results))


def _run_one(stage: Stage, out: Path, rehearses: bool, limit_s: float, num_gpus: int) -> Result:
    why = missing(stage, num_gpus, machine.has_package, rehearses)
    if why is not None:
        return Result(stage.name, "skipped", why=why)
    folder = out / f"{stage.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    print(f"{stage.name}: running, {folder}", flush=True)
    paths = [str(machine.ROOT), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if rehearses:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    return run_stage(stage, Setting(folder, out / "task", rehearses), stage.limit_s or limit_s, environ)


def _fill_in(stage: Stage, result: Result, out: Path, where: str, rehearses: bool) -> None:
    page = out / "gpu-results.md" if rehearses else PAGE
    text = (page if page.is_file() else PAGE).read_text(encoding="utf-8")
    for row in stage.rows:
        text = with_result(text, row, f"{time.strftime('%Y-%m-%d')}, {where}", result)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
