"""Kill parts of whole runs at random moments, resume them to the end, and check that nothing is lost.

    python tools/chaos.py --runs 20 --seed 1 [--pipelines async async-partial stream one-step-off] [--jobs 1] [--keep]

Each run trains a tiny model with an engine, a router, the Buffer and trainers, on the CPU. SIGKILL is sent to the
driver, the Buffer, an engine's server or a trainer: at any time after the first push, or while the engines generate,
while weights are pushed, while a checkpoint is written. Then the run is resumed, killed again or not, up to its end. A
run passes if

1. each attempt ends within a time limit, with one message that names who died, and leaves no process behind;
2. the trained groups are the data's prompts, each once and none left out, of a step that ran twice the later time;
3. no trained token is older than --max-staleness;
4. metrics.jsonl has each step once for each attempt, from the checkpoint on, and versions go up.

One line a run, then a summary in JSON. Exits with 1 if a run fails, and if the runs prove little: none was made, or one
of the parts that they were to kill first was never killed. The runs follow from the seed, and `--only N` makes
run N alone again; moments within it vary with the machine. Nothing is downloaded.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import chaos_check as check
from chaos_hooks import is_refused
from chaos_process import MOMENTS, VICTIMS, Attempt, Kill, check_end
from make_quickstart import build_model, build_tokenizer, write_jsonl

from fusionrl.pipeline.knobs import PIPELINES as PRESETS

HOOKS = Path(__file__).resolve().parent / "chaos_hooks.py"
NUM_GROUPS, NUM_SAMPLES = 4, 2  # prompts of a step, and samples of each
# Pipeline → staleness at most, rollouts between two pushes.
PIPELINES = {
    name: (int(PRESETS[name]["max_staleness"]), int(PRESETS[name]["update_weights_interval"]))
    for name in ("async", "async-partial", "one-step-off", "stream")
}
# The longest delay after a moment's begin: about as long as it takes.
LONGEST_DELAY_S = {"any": 0.6, "generating": 0.3, "training": 0.1, "push": 0.1, "checkpoint": 0.06}


@dataclass(frozen=True)
class Case:
    """One run: its flags, and who is killed when; the kills of one attempt each."""

    number: int
    pipeline: str
    flags: tuple[str, ...]
    kills: tuple[Kill, ...]
    has_filter: bool
    drops_late: bool
    at_once: bool  # after the driver's death, the next attempt starts without waiting for the others to be gone


@dataclass
class Outcome:
    """What became of a run."""

    case: Case
    num_attempts: int = 0
    seconds: float = 0.0
    kills: list[tuple[Kill, str | None]] = field(default_factory=list)  # with what the run was at; None: it ended first
    longest_end_s: float = 0.0  # from a kill to the end of the attempt
    largest_age: int = 0
    num_dropped: int = 0
    notes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


# ----------------------------------------------------------------------------------------------------------- planning
def plan_case(options: argparse.Namespace, number: int) -> Case:
    """Choose a run by the seed and its number: victims and pipelines in turn, the rest at random."""
    rng = random.Random(f"{options.seed}/{number}")
    victims, pipelines = options.victims, options.pipelines
    turn = number - 1
    pipeline = pipelines[(turn + turn // len(victims)) % len(pipelines)]
    num_kills = rng.randint(1, options.max_kills)
    kills = []
    for place in range(num_kills):
        victim = victims[turn % len(victims)] if place == 0 else rng.choice(victims)
        moment = rng.choice(options.moments)
        after = rng.randrange(place * options.steps // num_kills, (place + 1) * options.steps // num_kills)
        delay = rng.uniform(0, LONGEST_DELAY_S[moment])
        kills.append(Kill(victim, moment, min(after, options.steps - 2), round(delay, 4)))
    has_filter, drops_late = rng.random() < 0.25, pipeline.startswith("async") and rng.random() < 0.15
    flags = [
        *("--pipeline", pipeline, "--update-weight-transport", rng.choice(["auto", "broadcast", "disk"])),
        *("--save-interval", rng.choice(["1", "2"]), *(["--async-save"] if rng.random() < 0.5 else [])),
        *(["--actor-num-gpus-per-node", "2"] if rng.random() < 0.2 else []),
        *(["--dynamic-sampling-filter-path", f"{HOOKS}:keep"] if has_filter else []),
        *(["--at-deadline", "drop"] if drops_late else []),
        *(["--max-samples-in-flight", "6"] if rng.random() < 0.5 else []),
    ]
    if pipeline.startswith("async"):
        flags += ["--admission-lead", rng.choice(["0.5", "1", "2"])]
    return Case(number, pipeline, tuple(flags), tuple(kills), has_filter, drops_late, rng.random() < 0.5)


def shape_of(case: Case, options: argparse.Namespace) -> check.Shape:
    """Return the shape of the run, with its data: as many prompts as it trains or drops."""
    max_staleness, steps_per_push = PIPELINES[case.pipeline]
    rng = random.Random(f"{options.seed}/{case.number}/data")
    prompts: list[str] = []
    num_wanted = options.steps * NUM_GROUPS
    for a, b in rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], k=4 * num_wanted):
        prompts.append(f"{a}+{b}=")
        if sum(not (case.has_filter and is_refused(prompt)) for prompt in prompts) == num_wanted * (
            1 + case.drops_late
        ):
            break
    refused = frozenset(filter(is_refused, prompts)) if case.has_filter else frozenset()
    shape = check.Shape(tuple(prompts), options.steps, NUM_GROUPS, NUM_SAMPLES, max_staleness, steps_per_push)
    return replace(shape, refused=refused, drops_late=case.drops_late)


def command_of(case: Case, options: argparse.Namespace, model: Path, folder: Path) -> list[str]:
    """Return the command of an attempt."""
    return [
        *(sys.executable, "-m", "fusionrl.cli", "train"),
        *("--mode", "rl", "--device", "cpu", "--hf-checkpoint", str(model), "--run-dir", str(folder / "run")),
        *("--prompt-data", str(folder / "data.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *("--custom-rm-path", f"{HOOKS}:reward", "--rollout-batch-size", str(NUM_GROUPS), "--lr", "1e-3", "--use-tis"),
        *("--n-samples-per-prompt", str(NUM_SAMPLES), "--rollout-max-response-len", str(options.tokens)),
        *("--num-rollout", str(options.steps), "--verify-checkpoints", *case.flags),
        *(["--lora-rank", str(options.lora_rank)] if options.lora_rank else []),
    ]


# ------------------------------------------------------------------------------------------------------------ running
def run_case(case: Case, options: argparse.Namespace, model: Path, folder: Path) -> Outcome:
    """Run, kill, resume to the end, and check."""
    shape, outcome, since = shape_of(case, options), Outcome(case), time.monotonic()
    folder.mkdir(parents=True)
    write_jsonl(folder / "data.jsonl", ({"prompt": prompt, "label": ""} for prompt in shape.prompts))
    command, run_dir = command_of(case, options, model, folder), folder / "run"
    launches: list[check.Launch] = []
    kills: list[Kill | None] = [*case.kills, None]
    waiting: Attempt | None = None  # an attempt whose driver was killed, and that was not waited for
    for kill in kills:
        num_before, first_step = len(check.metric_lines(run_dir)[0]), check.newest_checkpoint(run_dir)
        more = ["--resume"] if launches else []
        attempt = Attempt([*command, *more], folder / f"output-{len(launches) + 1}.txt")
        end = attempt.run(kill, options.limit, options.end_limit)
        rows = check.metric_lines(run_dir)[0][num_before:]
        is_complete = bool(rows) and rows[-1]["step"] == shape.num_steps
        launches.append(check.Launch(first_step, rows, is_last=end.code == 0))
        name = f"attempt {len(launches)}"
        violations = check_end(end, kill.victim if kill and end.state else None, is_complete)
        if kill:
            outcome.kills.append((kill, end.state))
            outcome.longest_end_s = max(outcome.longest_end_s, end.seconds if end.state else 0.0)
        if waiting is not None:
            violations += [f"the attempt before has left a process: {text}" for text in waiting.left()]
            waiting = None
        if case.at_once and kill and kill.victim == "driver" and end.state and not violations:
            waiting = attempt
        else:
            violations += [f"a process is left: {text}" for text in attempt.left()]
        saved = check.trained_rows(run_dir, check.newest_checkpoint(run_dir))
        violations += check.check_doubled(shape, saved) + check.check_bound(shape, saved)
        outcome.violations += [f"{name}: {text}" for text in violations]
        if end.code == 0 or violations:
            break
    outcome.num_attempts, outcome.seconds = len(launches), time.monotonic() - since
    steps, (rows, num_torn) = check.trained_rows(run_dir), check.metric_lines(run_dir)
    outcome.largest_age, outcome.num_dropped = check.largest_age(shape, steps), check.num_dropped_late(rows)
    outcome.violations += check.check_metrics(shape, launches)
    if launches[-1].is_last:
        outcome.violations += check.check_prompts(shape, steps, num_dropped=outcome.num_dropped)
        outcome.violations += check.check_bound(shape, steps)
    if num_torn > sum(kill.victim == "driver" for kill in case.kills):
        outcome.violations.append(f"{num_torn} lines of metrics.jsonl are torn")
    outcome.notes += [f"left in the folder: {name}" for name in check.leftovers(run_dir)]
    return outcome


def told(outcome: Outcome) -> str:
    """Return the line of a run, and one for each violation."""
    case = outcome.case
    kills = "; ".join(f"{kill} ({state or 'ended first'})" for kill, state in outcome.kills)
    verdict = "FAIL" if outcome.violations else "pass"
    age = f"oldest token {outcome.largest_age}"
    head = (
        f"{verdict}  run {case.number:3}  {case.pipeline:13}  {outcome.num_attempts} attempts  {outcome.seconds:4.0f} s"
    )
    lines = [f"{head}  {age}  {kills}", *(f"      {text}" for text in outcome.violations)]
    if outcome.violations:
        lines.append(f"      flags: {' '.join(case.flags)}")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return the figures of all runs."""
    kills = [(outcome.case.pipeline, kill.victim, state) for outcome in outcomes for kill, state in outcome.kills]
    done = [(pipeline, victim, state) for pipeline, victim, state in kills if state is not None]
    return {
        "runs": len(outcomes),
        "failed": [outcome.case.number for outcome in outcomes if outcome.violations],
        "violations": sum(len(outcome.violations) for outcome in outcomes),
        "kills": len(done),
        "kills_too_late": len(kills) - len(done),
        "by_pipeline": dict(Counter(pipeline for pipeline, _, _ in done)),
        "by_victim": dict(Counter(victim for _, victim, _ in done)),
        "by_moment": dict(Counter(str(state).partition(" ")[0] for _, _, state in done)),
        "longest_end_s": round(max((outcome.longest_end_s for outcome in outcomes), default=0.0), 1),
        "largest_age": max((outcome.largest_age for outcome in outcomes), default=0),
        "seconds": round(sum(outcome.seconds for outcome in outcomes)),
    }


def proves_little(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """List what was to happen in these runs and did not: a run at all, and a kill of each one's first victim."""
    if not outcomes:
        return ["no run was made"]
    killed = {kill.victim for outcome in outcomes for kill, state in outcome.kills if state is not None}
    victims = dict.fromkeys(case.kills[0].victim for case in cases)
    return [f"in no run the {victim} was killed" for victim in victims if victim not in killed]


# ------------------------------------------------------------------------------------------------------- command line
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same runs")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these runs alone, counted from 1")
    parser.add_argument("--pipelines", nargs="+", choices=list(PIPELINES), default=["async", "async-partial"])
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--moments", nargs="+", choices=list(MOMENTS), default=list(MOMENTS))
    parser.add_argument("--max-kills", type=int, default=2, help="of a run, at most; one for each attempt")
    parser.add_argument("--steps", type=int, default=6, help="of a run")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank; 0: all weights")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further run after so long")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that an attempt may take")
    parser.add_argument("--end-limit", type=float, default=90.0, help="seconds from a kill to the end of the attempt")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that fail")
    parser.add_argument("--work", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file for the summary, with all runs")
    options = parser.parse_args(argv)
    for name, least in (("runs", 1), ("max_kills", 1), ("steps", 3), ("tokens", 1), ("jobs", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least {least}")
    if options.steps * NUM_GROUPS * 4 > 90 * 90:
        parser.error(f"--steps {options.steps}: the data have too few prompts for it; give at most 500")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; see the module."""
    options = parse(argv)
    work = Path(options.work or tempfile.mkdtemp(prefix="chaos-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    model = work / "model"
    if not model.is_dir():
        tokenizer = build_tokenizer()
        tokenizer.chat_template = None  # prompts are plain text, and so the same in the data and in rollouts
        build_model(tokenizer, options.seed).save_pretrained(model)
        tokenizer.save_pretrained(model)
    cases = [plan_case(options, number) for number in options.only or range(1, options.runs + 1)]
    outcomes: list[Outcome] = []

    since = time.monotonic()

    def run_one(case: Case) -> None:
        if time.monotonic() - since > 60 * options.minutes:
            return
        folder = work / f"run-{case.number}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            outcome = run_case(case, options, model, folder)
        except (ValueError, KeyError, OSError) as error:
            outcome = Outcome(case, violations=[f"its folder cannot be read: {error!r}"])
        outcomes.append(outcome)
        print(told(outcome), flush=True)
        if outcome.violations and options.keep:
            print(f"      kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(map(run_one, cases) if options.jobs == 1 else pool.map(run_one, cases))
    if options.work is None and not (options.keep and any(outcome.violations for outcome in outcomes)):
        shutil.rmtree(work, ignore_errors=True)
    outcomes.sort(key=lambda outcome: outcome.case.number)
    result = summary(outcomes)
    print(json.dumps(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result | {"all": [asdict(outcome) for outcome in outcomes]}, indent=1))
    gaps = proves_little(cases, outcomes)
    for text in gaps:
        print(text, file=sys.stderr)
    return 1 if result["failed"] or gaps else 0


if __name__ == "__main__":
    sys.exit(main())
