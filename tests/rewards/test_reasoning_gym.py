"""The rewards of reasoning-gym's tasks: each label is right, no answer is run, and no wrong answer is taken."""

import asyncio
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusionrl.data.sample import Sample
from plugins.rewards.reasoning_gym_reward import find_answer, reward
from plugins.rewards.reasoning_gym_tasks import ALGEBRA, ARITHMETIC, LITERALS, tasks
from tools.make_reasoning_data import TEMPLATE, generate_rows

pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym: scripts/setup-env.sh examples")
# Seconds to generate one row of these, and their verifiers read boards.
SLOW = frozenset({"knight_swap", "sokoban"})
EVALUATING = LITERALS | ARITHMETIC | ALGEBRA  # tasks whose verifiers evaluate answers


@functools.cache
def rows(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of training and one that is held out."""
    made = generate_rows(name, 1, 1, 0, TEMPLATE, {})
    (train,), (held_out,) = made.train, made.held_out
    return train, json.loads(json.dumps(held_out))


def score(response: str, row: dict[str, Any]) -> float:
    return asyncio.run(reward(None, Sample(response=response, label=row["label"], metadata=row["metadata"])))


def test_every_task_gives_rows_whose_label_is_right_and_no_answer_is_not() -> None:
    assert len(tasks()) > 100
    faults = []
    for name in tasks():
        train, row = rows(name)
        assert row["prompt"] != train["prompt"] and row["prompt"].endswith(TEMPLATE[-20:])
        assert isinstance(row["label"], str) and row["label"].strip()
        if score(f"<think>?</think> It is <answer>{row['label']}</answer>", row) != 1.0:
            faults.append(f"{name}: the label {row['label']!r} is not right")
        if max(score(empty, row) for empty in ("<answer></answer>", "I do not know.")) > 0.5:
            faults.append(f"{name}: no answer is right")
    assert faults == []


def test_no_verifier_runs_what_a_model_wrote(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    call = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    wrong = (call, f"[{call}]", "(" * 5000 + "1" + ")" * 5000, "9" * 6000, "A+" + "9" * 12, "nan", "1e999", "\x00")
    for_eval = (f"(lambda: {call})()", f"1 + ({call} or 1)", f"S({call!r})", f"{{'a': [{call}]}}", f"f'{{{call}}}'")
    for_eval += ("().__class__.__base__.__subclasses__()", "9**9**9**9", "(((9**99)**99)**99)")
    faults = []
    for name in tasks():
        if name in SLOW:
            continue
        row = rows(name)[1]
        for answer in (*wrong, *(for_eval if name in EVALUATING else ())):
            if score(f"<answer>{answer}</answer>", row) >= 1.0:
                faults.append(f"{name}: {answer[:40]!r} is right")
            if mark.exists():
                faults.append(f"{name}: {answer[:40]!r} was run")
                mark.unlink()
    assert faults == []


def test_the_verifiers_that_evaluate_answers_are_known() -> None:
    """A new version of reasoning-gym may have more of them."""
    import reasoning_gym

    evaluating = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?:answer|user_answer|student_answer)\b")
    folder = Path(reasoning_gym.__file__).parent
    found = {path.stem for path in folder.rglob("*.py") if evaluating.search(path.read_text(encoding="utf-8"))}
    assert found == EVALUATING


COMPLEX = {"answer": "48.0 + 36.0i", "metadata": {"result": [48.0, 36.0]}}
PUZZLE = {"answer": "(1 + 2)*(3 + 5)", "metadata": {"numbers": [1, 2, 3, 5]}}


@pytest.mark.parametrize(
    ("task", "entry", "right", "wrong"),
    [
        ("coin_flip", {"answer": "0.109375"}, ("0.109375", "7/64"), ("0", "0.1", "1")),
        ("game_of_life_halting", {"answer": "False"}, ("False", "false"), ("True", "no", "0")),
        ("game_of_life_halting", {"answer": "True"}, ("True",), ("False", "maybe")),
        ("complex_arithmetic", COMPLEX, ("48 + 36i", "48.0 + 36.0i"), ("nan", "inf", "nan+nanj", "36 + 48i")),
        ("puzzle24", PUZZLE, ("(1 + 2)*(3 + 5)", "(5+3)*(2+1)"), ("6*4*1*1",)),
    ],
)
def test_answers_that_verifiers_take_by_mistake(
    task: str, entry: dict[str, Any], right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    row = {"label": entry["answer"], "metadata": {"source_dataset": task, "entry": entry}}
    taken = tuple(answer for answer in (*right, *wrong) if score(f"<answer>{answer}</answer>", row) == 1.0)
    assert taken == right


def test_an_entry_of_another_task_is_an_error_and_a_bad_answer_is_not() -> None:
    entry: dict[str, Any] = {"entry": {"answer": "4", "metadata": {}}}
    row = {"label": "4", "metadata": {"source_dataset": "countdown"} | entry}
    assert score("<answer>__import__('os')</answer>", row) == 0.0
    for metadata, message in (
        ({}, "source_dataset, entry"),
        ({"source_dataset": "no_such_set"} | entry, "no_such_set"),
        ({"source_dataset": "n_queens"} | entry, "metadata.entry .*n_queens"),
        ({"source_dataset": "gcd", "config": {"max_valu": 3}} | entry, "gcd does not take the settings"),
    ):
        with pytest.raises(ValueError, match=message):
            score("<answer>Q _</answer>", {"label": "4", "metadata": metadata})


@pytest.mark.parametrize(
    ("response", "label", "answer"),
    [
        ("So it is <answer> 6*4 </answer>.", "8*3", "6*4"),
        ("<answer>1</answer> or <answer>2</answer>", "2", "2"),
        ("<answer>1</answer></think> 3 and 4", "2", "4"),
        ("the sum 1 + 2 is 3.", "3", "3"),
        ("6*4", "8*3", "6*4"),
        ("<answer>6*4", "8*3", None),
        ("<answer></answer> 3", "3", None),
        ("none", "3", None),
        ("", "8*3", None),
        # where the label is a number, the last number
        ("is -7", "1", "-7"),
        ("12-7", "1", "7"),
        ("(3)-5", "1", "5"),
        ("$1,234.50 in all", "1", "1234.50"),
        ("1, 2,3", "1", "3"),
    ],
)
def test_where_the_answer_stands(response: str, label: str, answer: str | None) -> None:
    assert find_answer(response, label) == answer
