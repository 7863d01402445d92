"""Write generated arithmetic (reasoning-gym's `chain_sum`) as prompts with answers, split in two.

    scripts/setup-env.sh examples
    python tools/make_reasoning_data.py --out DIR

writes DIR/train.jsonl and DIR/eval.jsonl, rows {"prompt", "label", "metadata"}. No evaluation prompt is ever trained
on, and none occurs twice. Training prompts come as often as reasoning-gym draws them: without repetition the short
expressions, of which there are few (200 of two one-digit numbers), would drown in the long ones. `metadata` carries
what reasoning-gym's own verifier needs; see plugins/rewards/reasoning_gym_reward.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DATASET = "chain_sum"
DEFAULT_TEMPLATE = "Calculate {expression}. Answer with the number only."


def generate_rows(
    train_size: int, eval_size: int, seed: int, template: str, config: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training rows, evaluation rows), in the order in which reasoning-gym generates them.

    `config` goes to reasoning-gym's data set (min_terms, max_terms, min_digits, max_digits, allow_negation).
    Raises `ValueError` where the config does not yield `eval_size` different expressions and others besides.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise SystemExit(
            "the package reasoning-gym is not installed; install it with: scripts/setup-env.sh examples"
        ) from error

    # Ten times as many draws as rows: enough unless the space of expressions is nearly used up.
    size = 10 * (train_size + eval_size)
    held_out: dict[str, dict[str, Any]] = {}
    train: list[dict[str, Any]] = []
    for item in reasoning_gym.create_dataset(DATASET, seed=seed, size=size, **config):
        expression = item["metadata"]["expression"]
        row = {
            "prompt": template.format(expression=expression, question=item["question"]),
            "label": item["answer"],
            "metadata": {
                "source_dataset": DATASET,
                "entry": {"answer": item["answer"], "expression": expression},
            },
        }
        if len(held_out) < eval_size:
            held_out.setdefault(expression, row)
        elif expression not in held_out:
            train.append(row)
        if len(train) == train_size:
            return train, list(held_out.values())
    raise ValueError(
        f"{size} draws gave {len(held_out)} different expressions for --eval-size {eval_size}, and {len(train)} others "
        f"for --train-size {train_size}; raise --max-digits or --max-terms, or ask for fewer"
    )


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parse_args() -> argparse.Namespace:
    """Command line; mistakes end the program with a message that names the flags."""
    parser = argparse.ArgumentParser(description="Write generated sums as train.jsonl and eval.jsonl.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--train-size", type=int, default=120, help="rows of train.jsonl")
    parser.add_argument("--eval-size", type=int, default=80, help="rows of eval.jsonl")
    parser.add_argument("--min-terms", type=int, default=2, help="fewest numbers in a sum")
    parser.add_argument("--max-terms", type=int, default=2, help="most numbers in a sum")
    parser.add_argument("--min-digits", type=int, default=1, help="fewest digits of a number")
    parser.add_argument("--max-digits", type=int, default=1, help="most digits of a number")
    parser.add_argument("--allow-negation", action="store_true", help="numbers may be negative")
    parser.add_argument("--seed", type=int, default=0, help="seed of generation")
    parser.add_argument(
        "--template",
        default=DEFAULT_TEMPLATE,
        help="prompt; {expression} is the sum, {question} reasoning-gym's own wording (default: %(default)s)",
    )
    args = parser.parse_args()
    for low, high in (("min_terms", "max_terms"), ("min_digits", "max_digits")):
        if not 1 <= getattr(args, low) <= getattr(args, high):
            flags = f"--{low} {getattr(args, low)} --{high} {getattr(args, high)}".replace("_", "-")
            parser.error(f"{flags}: the first must be at least 1 and at most the second")
    if args.train_size < 1 or args.eval_size < 1:
        parser.error(f"--train-size {args.train_size} --eval-size {args.eval_size}: both must be at least 1")
    if "{expression}" not in args.template and "{question}" not in args.template:
        parser.error(f"--template {args.template!r} holds neither {{expression}} nor {{question}}")
    return args


def main() -> None:
    """Command line."""
    args = parse_args()
    config = {
        name: getattr(args, name) for name in ("min_terms", "max_terms", "min_digits", "max_digits", "allow_negation")
    }
    train, held_out = generate_rows(args.train_size, args.eval_size, args.seed, args.template, config)
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "eval.jsonl", held_out)
    write_jsonl(args.out / "train.jsonl", train)
    print(f"{args.out}: train {args.train_size}, eval {args.eval_size}")


if __name__ == "__main__":
    main()
