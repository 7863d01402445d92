"""Write tasks of reasoning-gym as prompts with answers, split in two.

    scripts/setup-env.sh examples
    python tools/make_reasoning_data.py --out DIR                        sums (chain_sum)
    python tools/make_reasoning_data.py --task countdown --out DIR       another task
    python tools/make_reasoning_data.py --task gcd lcm --out DIR         several, each in a folder of its own
    python tools/make_reasoning_data.py --list                           all tasks and their settings

writes DIR/train.jsonl and DIR/eval.jsonl (of several tasks DIR/TASK/train.jsonl and DIR/TASK/eval.jsonl), rows
{"prompt", "label", "metadata"}. The label is an answer as a person would give it; `metadata` carries what the task's
own verifier needs (see plugins/rewards/reasoning_gym_reward.py). The verifier gives each label the full score: a row
whose label it refuses is drawn again, and counted.

No evaluation prompt is ever trained on, and none occurs twice. Training prompts come as often as reasoning-gym draws
them: without repetition the short sums, of which there are few (200 of two one-digit numbers), would drown in the long
ones.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from fusionrl.data.sample import Sample
from plugins.rewards.reasoning_gym_reward import exact_reward
from plugins.rewards.reasoning_gym_tasks import dataset, gold_answer, tasks

SUMS = "chain_sum"
SUMS_TEMPLATE = "Calculate {expression}. Answer with the number only."
TEMPLATE = "{question}\n\nWrite the final answer between <answer> and </answer>."
INSTALL = "the package reasoning-gym is not installed; install it with: scripts/setup-env.sh examples"
Row = dict[str, Any]


@dataclass
class Rows:
    """Rows of one task; `num_refused` were drawn again, because the verifier refused their labels."""

    train: list[Row]
    held_out: list[Row]
    num_refused: int


def generate_rows(task: str, train_size: int, eval_size: int, seed: int, template: str, config: dict[str, Any]) -> Rows:
    """Rows in the order in which reasoning-gym generates them.

    `config` goes to reasoning-gym's data set. Raises `ValueError` where that refuses it, or does not yield `eval_size`
    different prompts as well.
    """
    # Ten times as many draws as rows: enough unless the space of prompts is nearly used up.
    size = 10 * (train_size + eval_size)
    items = dataset(task, json.dumps(config | {"seed": seed, "size": size}, sort_keys=True))
    held_out: dict[str, Row] = {}
    rows = Rows([], [], 0)
    for number in range(size):
        item = items[number]
        # Sums are worded in several ways; the same sum in other words is the same.
        key = item["metadata"]["expression"] if task == SUMS else item["question"]
        row = make_row(task, item, template, config)
        if not is_right(row):
            rows.num_refused += 1
        elif len(held_out) < eval_size:
            held_out.setdefault(key, row)
        elif key not in held_out:
            rows.train.append(row)
        if len(rows.train) == train_size:
            return Rows(rows.train, list(held_out.values()), rows.num_refused)
    refused = f", and {rows.num_refused} with a label that its verifier refuses" if rows.num_refused else ""
    raise ValueError(
        f"{size} draws of {task} gave {len(held_out)} different prompts for --eval-size {eval_size}, and"
        f" {len(rows.train)} others for --train-size {train_size}{refused}; ask for fewer, or for larger tasks"
        + (" (--max-digits, --max-terms)" if task == SUMS else " (--config; --list names the settings)")
    )


def make_row(task: str, item: dict[str, Any], template: str, config: dict[str, Any]) -> Row:
    """One row, as it will be read from JSON."""
    label = gold_answer(task, item)
    expression = str(item["metadata"].get("expression", ""))
    metadata = {"source_dataset": task, "entry": {"answer": label, "metadata": item["metadata"]}}
    prompt = template.replace("{expression}", expression).replace("{question}", item["question"])
    row = {"prompt": prompt, "label": label, "metadata": metadata | ({"config": config} if config else {})}
    return json.loads(json.dumps(row))


def is_right(row: Row) -> bool:
    """Return whether the reward gives the label the full score, as the response of a model."""
    if row["label"] is None:
        return False
    sample = Sample(response=f"<answer>{row['label']}</answer>", label=row["label"], metadata=row["metadata"])
    return asyncio.run(exact_reward(None, sample)) == 1.0


def write_jsonl(path: Path, rows: Sequence[Row]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings_of(task: str) -> dict[str, Any]:
    """Settings of a task and their defaults, but for seed and size."""
    from reasoning_gym.factory import DATASETS

    sums = {}
    for field in fields(DATASETS[task][1]):
        factory = field.default_factory
        sums[field.name] = factory() if factory is not MISSING else field.default
    return {name: value for name, value in sums.items() if name not in ("seed", "size")}


def read_settings(texts: Sequence[str], chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`[TASK.]KEY=VALUE` → the settings of each task; a value is JSON, or else text.

    Raises `ValueError` for a task that was not chosen, or a key that it does not have.
    """
    settings: dict[str, dict[str, Any]] = {task: {} for task in chosen}
    for text in texts:
        name, equals, value = text.partition("=")
        task, dot, key = name.rpartition(".")
        task = task if dot else chosen[0]
        if not equals or (not dot and len(chosen) > 1):
            raise ValueError(f"--config {text}: write KEY=VALUE for one task, TASK.KEY=VALUE for several")
        if task not in settings:
            raise ValueError(f"--config {text}: {task} is none of --task {' '.join(chosen)}")
        if key not in (known := settings_of(task)):
            raise ValueError(f"--config {text}: {task} has no setting {key!r}; it has {', '.join(known)}")
        try:
            settings[task][key] = json.loads(value)
        except json.JSONDecodeError:
            settings[task][key] = value
    return settings


def parse_args() -> argparse.Namespace:
    """Command line; mistakes end the program with a message that names the flags."""
    parser = argparse.ArgumentParser(description="Write tasks of reasoning-gym as train.jsonl and eval.jsonl.")
    parser.add_argument("--task", nargs="+", default=[SUMS], help=f"tasks, or all (default: {SUMS})")
    parser.add_argument("--list", action="store_true", help="print all tasks with their settings, and end")
    parser.add_argument("--out", type=Path, help="folder to write")
    parser.add_argument("--train-size", type=int, default=120, help="rows of train.jsonl, for each task")
    parser.add_argument("--eval-size", type=int, default=80, help="rows of eval.jsonl, for each task")
    parser.add_argument(
        "--config", nargs="+", default=[], metavar="[TASK.]KEY=VALUE", help="settings of a task; see --list"
    )
    for name, help_text in (
        ("min-terms", "fewest numbers in a sum (2)"),
        ("max-terms", "most numbers in a sum (2)"),
        ("min-digits", "fewest digits of a number (1)"),
        ("max-digits", "most digits of a number (1)"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{SUMS}: {help_text}")
    parser.add_argument("--allow-negation", action="store_true", help=f"{SUMS}: numbers may be negative")
    parser.add_argument("--seed", type=int, default=0, help="seed of generation")
    parser.add_argument(
        "--template",
        help="prompt; {question} is reasoning-gym's own wording, {expression} the sum of a chain_sum"
        f" (default: {TEMPLATE!r}, of {SUMS} {SUMS_TEMPLATE!r})",
    )
    args = parser.parse_args()
    if args.list:
        return args
    if args.out is None:
        parser.error("--out is required: the folder to write")
    if args.train_size < 1 or args.eval_size < 1:
        parser.error(f"--train-size {args.train_size} --eval-size {args.eval_size}: both must be at least 1")
    known = tasks()
    args.task = known if args.task == ["all"] else list(dict.fromkeys(args.task))
    if unknown := [task for task in args.task if task not in known]:
        parser.error(f"--task {unknown[0]}: unknown; known are all, {', '.join(known)}")
    _check_sums(parser, args)
    template = args.template
    if (
        template is not None
        and "{question}" not in template
        and (args.task != [SUMS] or "{expression}" not in template)
    ):
        also = "neither {expression} nor {question}" if args.task == [SUMS] else "no {question}"
        parser.error(f"--template {template!r} holds {also}")
    try:
        args.settings = read_settings(args.config, args.task)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check_sums(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in the settings of sums, which have flags of their own."""
    passed = [
        name for name in ("min_terms", "max_terms", "min_digits", "max_digits") if getattr(args, name) is not None
    ]
    passed += ["allow_negation"] if args.allow_negation else []
    if passed and SUMS not in args.task:
        parser.error(f"--{passed[0].replace('_', '-')} belongs to --task {SUMS}; others have --config")
    for low, high, default in (("min_terms", "max_terms", 2), ("min_digits", "max_digits", 1)):
        for name in (low, high):
            setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
        if not 1 <= getattr(args, low) <= getattr(args, high):
            flags = f"--{low} {getattr(args, low)} --{high} {getattr(args, high)}".replace("_", "-")
            parser.error(f"{flags}: the first must be at least 1 and at most the second")


def print_tasks() -> None:
    """One line a task."""
    for task in tasks():
        settings = [f"{name}={json.dumps(value, default=str)}" for name, value in settings_of(task).items()]
        print(f"{task}: {', '.join(settings)}")


def main() -> None:
    """Command line."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise SystemExit(INSTALL) from error
    args = parse_args()
    if args.list:
        print_tasks()
        return
    names = ("min_terms", "max_terms", "min_digits", "max_digits", "allow_negation")
    folders = {task: args.out / task if len(args.task) > 1 else args.out for task in args.task}
    for task, folder in folders.items():
        is_sums = task == SUMS
        sizes = {name: getattr(args, name) for name in names} if is_sums else {}
        template = args.template or (SUMS_TEMPLATE if is_sums else TEMPLATE)
        config = sizes | args.settings[task]
        try:
            rows = generate_rows(task, args.train_size, args.eval_size, args.seed, template, config)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from error
        write_jsonl(folder / "eval.jsonl", rows.held_out)
        write_jsonl(folder / "train.jsonl", rows.train)
        refused = f"; {rows.num_refused} draws left out, whose labels the verifier refuses" if rows.num_refused else ""
        print(f"{folder}: train {len(rows.train)}, eval {len(rows.held_out)}{refused}")
    if len(folders) > 1:
        print("--prompt-data " + " ".join(f"{task}={folder / 'train.jsonl'}" for task, folder in folders.items()))
        print("--eval-prompt-data " + " ".join(f"{task} {folder / 'eval.jsonl'}" for task, folder in folders.items()))


if __name__ == "__main__":
    main()
