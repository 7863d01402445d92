"""Write the data of an environment of the package `verifiers` as prompts, for plugins/agents/verifiers_env.py.

    scripts/setup-env.sh examples
    python tools/make_verifiers_data.py --env verifiers.ReasoningGymEnv --env-args '{"gym": "chain_sum"}' --out DIR

writes DIR/train.jsonl and, where the environment has data for evaluation, DIR/eval.jsonl: rows {"prompt", "label",
"metadata"}. The metadata holds the environment's name and arguments, and the row with all that its rubric wants, so
that files of several environments can be put together.
"""

import argparse
import json
from pathlib import Path
from typing import Any


def make_rows(name: str, env_args: dict[str, Any], split: str, size: int) -> list[dict[str, Any]]:
    """At most `size` rows (-1: all) of `split`, "train" or "eval"; none where the environment has no such data.

    Raises:
        ValueError: verifiers is not installed, the environment cannot be made, or a column cannot be written as JSON.
    """
    from plugins.agents.verifiers_env import as_chat, load_env

    env = load_env(name, json.dumps(env_args, sort_keys=True))
    built = env.build_dataset() if split == "train" else env.build_eval_dataset()
    if built is None:
        return []
    rows = []
    for row in built.select(range(len(built) if size < 0 else min(size, len(built)))):
        prompt = row.pop("prompt")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        for column, value in row.items():
            try:
                json.dumps(value)
            except TypeError as error:
                raise ValueError(f"--env {name}: its column {column!r} cannot be written as JSON ({error})") from error
        rows.append(
            {
                "prompt": [as_chat(message) for message in messages],
                "label": row.get("answer"),
                "metadata": {"verifiers": {"env": name, "env_args": env_args, "input": row}},
            }
        )
    return rows


def main() -> None:
    """Command line; mistakes end the program with a message that names the flag."""
    parser = argparse.ArgumentParser(description="Write the data of an environment of verifiers as prompts.")
    parser.add_argument(
        "--env", required=True, help="installed environment, package.module.function or file.py:function"
    )
    parser.add_argument("--env-args", default="{}", help="its arguments, a JSON object (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--train-size", type=int, default=-1, help="most rows of train.jsonl; -1: all")
    parser.add_argument("--eval-size", type=int, default=-1, help="most rows of eval.jsonl; -1: all")
    args = parser.parse_args()
    try:
        env_args = json.loads(args.env_args)
    except json.JSONDecodeError as error:
        parser.error(f"--env-args {args.env_args!r} is not JSON ({error})")
    if not isinstance(env_args, dict):
        parser.error(f"--env-args {args.env_args!r} is not a JSON object")
    try:
        entry = {
            split: make_rows(args.env, env_args, split, size)
            for split, size in (("train", args.train_size), ("eval", args.eval_size))
        }
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    for split, rows in entry.items():
        if rows:
            (args.out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{args.out}: train {len(entry['train'])}, eval {len(entry['eval'])}")


if __name__ == "__main__":
    main()
