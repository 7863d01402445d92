"""Score a corpus of answers with a checkout's graders of slime and with the rewards of the same names here.

    python tools/from_slime_scores.py --slime DIR

DIR is a checkout that you have: its `slime/rollout/rm_hub` is imported in a process of its own, and nothing of it is
kept but the scores. It needs its own packages (sympy, pylatexenc, aiohttp). Each line of the corpus
(tests/rewards/corpus.jsonl) is an answer with the score that slime gives (`slime`), and, where ours differs, ours
(`ours`) and the name of the reason (`why`), which docs/guides/rewards.md gives in full.

Every difference that is not stated there is printed, and the exit status is 1. `--write FILE` writes the corpus anew,
with the scores of both, for a look at what has changed; a reason is kept where the line has one.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[1] / "tests" / "rewards" / "corpus.jsonl"
TIMEOUT_S = 600.0
_CHILD = "--in-a-process-of-its-own"


def read_corpus(path: Path = CORPUS) -> list[dict[str, Any]]:
    """Return the answers of a corpus."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def our_score(case: dict[str, Any]) -> object:
    """Return what the reward here gives for an answer: a number, or a dict; "error" where it raises."""
    from fusionrl.rewards.registry import grade

    try:
        reward = grade(case["rm_type"], case["response"], case["label"], case.get("metadata")).reward
    except ValueError:
        return "error"
    return _plain(reward)


def slime_scores(folder: Path, cases: list[dict[str, Any]]) -> list[object]:
    """Return what the graders of the checkout `folder` give for the answers.

    Raises:
        RuntimeError: they cannot be imported, with the end of what Python said.
    """
    command = [sys.executable, __file__, "--slime", str(folder.resolve()), _CHILD]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the graders of {folder} cannot be run:\n{done.stderr[-2000:]}")
    scores: list[object] = json.loads(done.stdout.splitlines()[-1])
    return scores


def _child(folder: str) -> None:
    """Score the answers on stdin with the checkout's graders, and print the list of scores."""
    sys.path.insert(0, folder)
    from slime.rollout.rm_hub import async_rm  # type: ignore[import-not-found]

    async def score(case: dict[str, Any]) -> object:
        sample = Namespace(custom_rm_path=None, metadata=case.get("metadata") or {})
        sample.prompt, sample.response, sample.label = "", case["response"], case["label"]
        try:
            return _plain(await async_rm(Namespace(custom_rm_path=None, rm_type=case["rm_type"]), sample))
        except Exception:  # whatever a grader raises ends a run there: it is one kind of score here
            return "error"

    async def score_all() -> list[object]:
        return [await score(case) for case in json.load(sys.stdin)]

    print(json.dumps(asyncio.run(score_all())))


def _plain(reward: Any) -> object:
    if isinstance(reward, dict):
        return {"score": float(reward["score"]), "acc": bool(reward["acc"])}
    return round(float(reward), 6)


def main() -> int:
    """Compare the scores; returns 1 where a difference is not stated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slime", required=True, help="a checkout of slime")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="answers, one JSON object a line")
    parser.add_argument("--write", type=Path, help="write the corpus with the scores of both to this file")
    parser.add_argument(_CHILD, action="store_true", dest="is_child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.is_child:
        _child(args.slime)
        return 0
    cases = read_corpus(args.corpus)
    theirs = slime_scores(Path(args.slime), cases)
    counts: Counter[str] = Counter()
    num_unstated, lines = 0, []
    for case, slime in zip(cases, theirs, strict=True):
        ours = our_score(case)
        stated = {key: case[key] for key in ("slime", "ours", "why") if key in case}
        answer = {key: value for key, value in case.items() if key not in ("slime", "ours", "why")}
        kind = "the same" if ours == slime else "different, stated" if "why" in case else "different"
        is_as_stated = stated.get("slime") == slime and stated.get("ours", slime) == ours
        counts[f"{case['rm_type']}: {kind}"] += 1
        if not is_as_stated or kind == "different":
            num_unstated += 1
            print(f"{json.dumps(answer, ensure_ascii=False)}\n    slime {slime}, here {ours}; stated {stated}")
        why = {"ours": ours, "why": case.get("why", "?")} if ours != slime else {}
        lines.append(json.dumps({**answer, "slime": slime, **why}, ensure_ascii=False))
    for name, count in sorted(counts.items()):
        print(f"{name:40} {count}")
    math = [case for case in cases if case["rm_type"] == "math"]
    num_agreed = sum(our_score(case) == our_score({**case, "rm_type": "math_verify"}) for case in math)
    print(f"{'math-verify agrees with math here':40} {num_agreed} of {len(math)}")
    print(f"{len(cases)} answers, {num_unstated} not as stated")
    if args.write:
        args.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(num_unstated > 0)


if __name__ == "__main__":
    sys.exit(main())
