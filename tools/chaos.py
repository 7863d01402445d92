"""Strike parts of whole supervised runs at random moments, and check that each run comes to its end and loses nothing.

    python tools/chaos.py --runs 36 --seed 1 [--pipelines on-policy async-partial recorded] [--jobs 1] [--keep]

Each run trains a tiny model with one or two engines, a router, the Buffer and trainers, on the CPU, under
`--supervise`. SIGKILL or SIGSTOP is sent several times to the driver, the Buffer, the router, an engine's server or
actor, a trainer or a reward process: in the start, amid generation, training, a push, a checkpoint, an evaluation, or
the end. Nobody resumes the run but itself. It passes if

1. it ends well within a time limit and leaves no process behind;
2. the trained groups are the data's prompts, each once and none left out, of a step that ran twice the later time;
3. no trained token is older than --max-staleness;
4. metrics.jsonl has each step, no attempt skips one, and versions go up;
5. its last checkpoint has the weights and the optimizer of an undisturbed run, bit by bit: pipeline `recorded`, which
   trains on recorded rollouts, and `on-policy`, which repeats on a CPU; unless a reward process was struck (its sample
   has no reward then), or trainers came back on fewer devices (a rank that dies in its start loses its device).

One line a run, then a table and a summary in JSON. Exits with 1 if a run fails, and if the runs prove little: a part
was never struck. The runs follow from the seed, and `--only N` makes run N alone again; moments within it vary with
the machine. Nothing is downloaded.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import chaos_check as check
from chaos_hooks import is_refused
from chaos_process import MOMENTS, VICTIMS, Fault, SupervisedRun, check_end
from make_quickstart import build_model, build_tokenizer, write_jsonl

from fusionrl.pipeline.knobs import PIPELINES as PRESETS

HOOKS = Path(__file__).resolve().parent / "chaos_hooks.py"
NUM_GROUPS, NUM_SAMPLES = 4, 2  # prompts of a step, and samples of each
RECORDED = "recorded"
PIPELINES = ("on-policy", "async-partial", RECORDED, "async", "one-step-off", "stream")
REPEATING = ("on-policy", RECORDED)
OF_RECORDED = ("driver", "buffer", "trainer")  # the parts of a run without engines
# The longest delay after a moment's begin: about as long as it takes.
LONGEST_DELAY_S = {"start": 6.0, "generate": 0.4, "train": 0.1, "push": 0.1, "save": 0.05, "evaluate": 0.2, "end": 0.5}
STALL_S, STALL = 45.0, 0.075  # --stall-timeout-s at least, and of --limit: what is stopped and has no limit of its own


@dataclass(frozen=True)
class Case:
    """One run: its flags, and who is struck when."""

    number: int
    pipeline: str
    flags: tuple[str, ...]
    num_trainers: int
    faults: tuple[Fault, ...]
    has_filter: bool


@dataclass
class Outcome:
    """What became of a run."""

    case: Case
    seconds: float = 0.0
    num_attempts: int = 0
    struck: list[tuple[Fault, str | None]] = field(
        default_factory=list
    )  # with what the run was at; None: it ended first
    compared: bool = False  # with the weights of an undisturbed run
    notes: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


# ----------------------------------------------------------------------------------------------------------- planning
def plan_case(options: argparse.Namespace, number: int) -> Case:
    """Choose a run by the seed and its number: pipelines and first victims in turn, the rest at random."""
    rng = random.Random(f"{options.seed}/{number}")
    pipeline = options.pipelines[(number - 1) % len(options.pipelines)]
    turn = (number - 1) // len(options.pipelines)
    victims = [name for name in options.victims if pipeline != RECORDED or name in OF_RECORDED]
    moments = [name for name in options.moments if pipeline != RECORDED or name not in ("push", "evaluate")]
    count, faults = rng.randint(2, options.max_faults), []
    for place in range(count):
        victim = victims[turn % len(victims)] if place == 0 else rng.choice(victims)
        moment = rng.choice(moments)
        after = {"start": 0, "end": options.steps}.get(moment, place * (options.steps - 1) // count)
        number_of = "STOP" if rng.random() < 0.15 else "KILL"
        faults.append(Fault(victim, number_of, moment, after, round(rng.uniform(0, LONGEST_DELAY_S[moment]), 3)))
    faults.sort(key=lambda fault: (fault.moment == "end", fault.after_step, fault.moment != "start"))
    num_trainers = 2 if rng.random() < 0.25 else 1
    has_filter = pipeline not in REPEATING and rng.random() < 0.25
    flags = [*("--save-interval", rng.choice(["1", "2"])), *(["--async-save"] if rng.random() < 0.5 else [])]
    flags += ["--actor-num-gpus-per-node", str(num_trainers)]
    if pipeline != RECORDED:
        flags += ["--pipeline", pipeline, "--update-weight-transport", rng.choice(["auto", "broadcast", "disk"])]
        if rng.random() < 0.5:
            flags += ["--rollout-num-gpus", "2", "--use-fault-tolerance", "--rollout-health-check-interval", "3"]
            flags += ["--rollout-health-check-timeout", "15"]
        flags += ["--dynamic-sampling-filter-path", f"{HOOKS}:keep"] if has_filter else []
    if pipeline.startswith("async"):
        flags += ["--admission-lead", rng.choice(["0.5", "1", "2"])]
    return Case(number, pipeline, tuple(flags), num_trainers, tuple(faults), has_filter)


def shape_of(case: Case, options: argparse.Namespace) -> check.Shape:
    """Return the shape of the run, with its data: as many prompts as it trains; those that repeat have the same."""
    preset = PRESETS.get(case.pipeline, {"max_staleness": 0, "update_weights_interval": 1})
    rng = random.Random(f"{options.seed}/data" if case.pipeline in REPEATING else f"{options.seed}/{case.number}/data")
    prompts: list[str] = []
    num_wanted = options.steps * NUM_GROUPS
    for a, b in rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], k=4 * num_wanted):
        prompts.append(f"{a}+{b}=")
        if sum(not (case.has_filter and is_refused(prompt)) for prompt in prompts) == num_wanted:
            break
    refused = frozenset(filter(is_refused, prompts)) if case.has_filter else frozenset()
    bound, interval = int(preset["max_staleness"]), int(preset["update_weights_interval"])
    return check.Shape(tuple(prompts), options.steps, NUM_GROUPS, NUM_SAMPLES, bound, interval, refused)


def command_of(case: Case, options: argparse.Namespace, work: Path, folder: Path) -> list[str]:
    """Return the command of a run in `folder`."""
    flags = [
        *(sys.executable, "-m", "fusionrl.cli", "train", "--mode", "rl", "--device", "cpu"),
        *("--hf-checkpoint", str(work / "model"), "--run-dir", str(folder / "run"), "--lr", "1e-3", "--use-tis"),
        *("--rollout-batch-size", str(NUM_GROUPS), "--n-samples-per-prompt", str(NUM_SAMPLES)),
        *("--rollout-max-response-len", str(options.tokens), "--num-rollout", str(options.steps)),
        *("--custom-rm-path", f"{HOOKS}:reward", "--reward-timeout-s", "10", "--verify-checkpoints", *case.flags),
        *("--supervise", "--max-restarts", "1000", "--stall-timeout-s", str(max(STALL_S, STALL * options.limit))),
    ]
    if case.pipeline == RECORDED:
        return [
            *flags,
            "--debug-train-only",
            "--load-debug-rollout-data",
            str(work / "recorded" / "{rollout_id}.jsonl"),
        ]
    flags += ["--prompt-data", str(folder / "data.jsonl"), "--input-key", "prompt", "--label-key", "label"]
    return [*flags, "--eval-prompt-data", "held", str(work / "held.jsonl"), "--eval-interval", "2"]


# ------------------------------------------------------------------------------------------------------------ running
class References:
    """Final states of undisturbed runs, each made once: what the last checkpoint has of weights and optimizer."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._options, self._work, self._states, self._lock = (
            options,
            work,
            dict[tuple[str, int], object](),
            threading.Lock(),
        )

    def state(self, case: Case) -> object:
        """Return that of a run that `case` is to repeat."""
        with self._lock:
            if not (self._work / "recorded").is_dir():
                self._run(
                    "on-policy", 1, ["--save-debug-rollout-data", str(self._work / "recorded" / "{rollout_id}.jsonl")]
                )
            if (case.pipeline, case.num_trainers) not in self._states:
                self._run(case.pipeline, case.num_trainers, [])
            return self._states[case.pipeline, case.num_trainers]

    def _run(self, pipeline: str, num_trainers: int, more: Sequence[str]) -> None:
        flags = ("--actor-num-gpus-per-node", str(num_trainers), *more)
        case = Case(0, pipeline, flags, num_trainers, (), has_filter=False)
        outcome = run_case(case, self._options, self._work, self._work / f"undisturbed-{pipeline}-{num_trainers}", None)
        if outcome.violations:
            raise ValueError(f"an undisturbed run fails: {outcome.violations}")
        folder = self._work / f"undisturbed-{pipeline}-{num_trainers}"
        self._states[pipeline, num_trainers] = final_state(folder / "run", self._options.steps)
        shutil.rmtree(folder, ignore_errors=True)


def final_state(run_dir: Path, steps: int) -> object:
    """Return the hashes of weights and optimizer, rank by rank, in the checkpoint after the last step."""
    manifest = json.loads((run_dir / "checkpoints" / f"step_{steps:06d}" / "manifest.json").read_text())
    return [{name: ranks[name] for name in ("weights", "optimizer")} for ranks in manifest["hashes"]["trainers"]]


def run_case(
    case: Case, options: argparse.Namespace, work: Path, folder: Path, references: References | None
) -> Outcome:
    """Run, strike, wait for the end, and check."""
    shape, outcome, since = shape_of(case, options), Outcome(case), time.monotonic()
    expected = references.state(case) if references is not None and case.pipeline in REPEATING else None
    folder.mkdir(parents=True)
    write_jsonl(folder / "data.jsonl", ({"prompt": prompt, "label": ""} for prompt in shape.prompts))
    run_dir = folder / "run"
    running = SupervisedRun(command_of(case, options, work, folder), folder / "output.txt")
    end = running.run(case.faults, run_dir, options.limit)
    outcome.struck = list(zip(case.faults, end.states, strict=True))
    outcome.violations += check_end(end) + [f"a process is left: {text}" for text in running.left()]
    steps, (rows, num_torn) = check.trained_rows(run_dir), check.metric_lines(run_dir)
    outcome.violations += check.check_prompts(shape, steps) + check.check_bound(shape, steps)
    launches = launches_of(rows)
    outcome.num_attempts = len(launches)
    outcome.violations += check.check_metrics(shape, launches) + check_attempts(shape, launches)
    if num_torn > sum(fault.victim == "driver" for fault, _ in outcome.struck):
        outcome.violations.append(f"{num_torn} lines of metrics.jsonl are torn")
    hit = {fault.victim for fault, state in outcome.struck if state is not None}
    has_fewer = (
        case.num_trainers > 1 and "on 1 device," in end.output
    )  # a rank that died in its start: equal to rounding
    if expected is not None and "reward" not in hit and not has_fewer and not outcome.violations:
        outcome.compared = True
        if final_state(run_dir, options.steps) != expected:
            outcome.violations.append("the last checkpoint is not that of an undisturbed run")
    outcome.notes += [f"left in the folder: {name}" for name in check.leftovers(run_dir)]
    outcome.seconds = time.monotonic() - since
    return outcome


def launches_of(rows: Sequence[dict[str, object]]) -> list[check.Launch]:
    """Return the attempts that have lines; of a step that trainers trained again when they came back, the last line."""
    launches = []
    for _, group in groupby(rows, key=lambda row: row["attempt"]):
        last = {int(str(row["step"])): row for row in group}
        steps = sorted(last)
        launches.append(check.Launch(steps[0], [last[step] for step in steps], is_last=False))
    if launches:
        launches[-1].is_last = True
    return launches


def check_attempts(shape: check.Shape, launches: Sequence[check.Launch]) -> list[str]:
    """Check that no attempt begins behind a step that no attempt before has done."""
    violations, done = [], 0
    for number, launch in enumerate(launches, start=1):
        if launch.first_step > done + 1:  # without engines a start has no line of its own
            violations.append(f"start {number} begins after step {launch.first_step}, and only {done} are done")
        done = max([done, *(int(str(row["step"])) for row in launch.rows)])
    return violations


def told(outcome: Outcome) -> str:
    """Return the line of a run, and one for each violation."""
    case = outcome.case
    faults = "; ".join(f"{fault} ({state or 'ended first'})" for fault, state in outcome.struck)
    head = f"{'FAIL' if outcome.violations else 'pass'}  run {case.number:3}  {case.pipeline:13}"
    head += f"  {outcome.num_attempts} attempts  {outcome.seconds:4.0f} s" + "  equal" * outcome.compared
    lines = [f"{head}  {faults}", *(f"      {text}" for text in outcome.violations)]
    if outcome.violations:
        lines.append(f"      flags: {' '.join(case.flags)}")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return the figures of all runs."""
    faults = [(outcome.case.pipeline, fault, state) for outcome in outcomes for fault, state in outcome.struck]
    done = [(pipeline, fault, state) for pipeline, fault, state in faults if state is not None]
    return {
        "runs": len(outcomes),
        "failed": [outcome.case.number for outcome in outcomes if outcome.violations],
        "violations": sum(len(outcome.violations) for outcome in outcomes),
        "faults": len(done),
        "faults_too_late": len(faults) - len(done),
        "compared": sum(outcome.compared for outcome in outcomes),
        "by_signal": dict(Counter(fault.signal for _, fault, _ in done)),
        "by_pipeline": dict(Counter(pipeline for pipeline, _, _ in done)),
        "by_victim": dict(Counter(fault.victim for _, fault, _ in done)),
        "by_moment": dict(Counter(str(state).partition(" ")[0] for _, _, state in done)),
        "seconds": round(sum(outcome.seconds for outcome in outcomes)),
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the faults as a table in Markdown: of each part how many came at which moment, KILL and STOP."""
    done = Counter(
        (fault.victim, str(state).partition(" ")[0])
        for outcome in outcomes
        for fault, state in outcome.struck
        if state is not None
    )
    stops = Counter(f.victim for outcome in outcomes for f, state in outcome.struck if state and f.signal == "STOP")
    columns = [*MOMENTS, "between"]
    lines = [f"| | {' | '.join(columns)} | in all | of these SIGSTOP |", "|---" * (len(columns) + 3) + "|"]
    for victim in VICTIMS:
        counts = [done[victim, moment] for moment in columns]
        lines.append(f"| {victim} | {' | '.join(map(str, counts))} | {sum(counts)} | {stops[victim]} |")
    return "\n".join(lines)


def proves_little(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[str]:
    """List what was to happen in these runs and did not: a run at all, and a blow to each one's first victim."""
    if not outcomes:
        return ["no run was made"]
    hit = {fault.victim for outcome in outcomes for fault, state in outcome.struck if state is not None}
    victims = dict.fromkeys(case.faults[0].victim for case in cases)
    return [f"in no run the {victim} was struck" for victim in victims if victim not in hit]


# ------------------------------------------------------------------------------------------------------- command line
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=36)
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same runs")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these runs alone, counted from 1")
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, default=list(PIPELINES[:3]))
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--moments", nargs="+", choices=list(MOMENTS), default=list(MOMENTS))
    parser.add_argument("--max-faults", type=int, default=4, help="of a run, at most; at least 2")
    parser.add_argument("--steps", type=int, default=6, help="of a run")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further run after so long")
    parser.add_argument("--limit", type=float, default=600.0, help="of a run in seconds; a slow machine needs more")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that fail")
    parser.add_argument("--work", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file for the summary, with all runs")
    options = parser.parse_args(argv)
    for name, least in (("runs", 1), ("max_faults", 2), ("steps", 3), ("tokens", 1), ("jobs", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least {least}")
    if options.steps * NUM_GROUPS * 4 > 90 * 90:
        parser.error(f"--steps {options.steps}: the data have too few prompts for it; give at most 500")
    if RECORDED in options.pipelines and set(OF_RECORDED).isdisjoint(options.victims):
        parser.error(f"--pipelines {RECORDED}: its runs have a {', a '.join(OF_RECORDED)} alone")
    return options


def prepare(work: Path, seed: int) -> None:
    """Make the model and the prompts of evaluations, where they are not there."""
    if (work / "model").is_dir():
        return
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None  # prompts are plain text, and so the same in the data and in rollouts
    build_model(tokenizer, seed).save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    write_jsonl(work / "held.jsonl", ({"prompt": f"{a}+1=", "label": ""} for a in range(1, 9)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; see the module."""
    options = parse(argv)
    work = Path(options.work or tempfile.mkdtemp(prefix="chaos-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    prepare(work, options.seed)
    cases = [plan_case(options, number) for number in options.only or range(1, options.runs + 1)]
    outcomes, references, since = list[Outcome](), References(options, work), time.monotonic()

    def run_one(case: Case) -> None:
        if time.monotonic() - since > 60 * options.minutes:
            return
        folder = work / f"run-{case.number}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            outcome = run_case(case, options, work, folder, references)
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
    print(table(outcomes))
    print(json.dumps(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result | {"all": [asdict(outcome) for outcome in outcomes]}, indent=1))
    gaps = proves_little(cases, outcomes)
    for text in gaps:
        print(text, file=sys.stderr)
    return 1 if result["failed"] or gaps else 0


if __name__ == "__main__":
    sys.exit(main())
