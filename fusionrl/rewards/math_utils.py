"""Answers to mathematical questions: find them in a response, and decide whether two are equal."""

import re
from collections.abc import Sequence
from decimal import Decimal
from itertools import product
from typing import Any

from fusionrl.base.wording import install_hint
from fusionrl.rewards.numbers import hundredth, is_equal_number, join_thousands, read_number
from fusionrl.rewards.registry import BOX, Reward, extract_answer
from fusionrl.rewards.text_match import read_text

_DIGITS = 30  # of a value that is compared


def math_reward(response: str, label: object) -> float:
    """1 where math-verify finds the response's final answer equal to the label.

    Two plain numbers are compared exactly; values of expressions to 6 significant digits. 50 % is 50, and it is 0.5.
    Raises ValueError if the package math-verify is not installed.
    """
    texts = str(label), extract_answer(response) or ""
    gold, answer = (read_number(text) for text in texts)
    if gold is not None and answer is not None and type(gold) is type(answer):
        is_percent = ["%" in text for text in texts]
        if is_equal_number(gold, answer) or is_percent[0] == is_percent[1]:
            return float(gold == answer)
        return float(hundredth(gold) == answer if is_percent[0] else gold == hundredth(answer))
    truth = str(label)  # without dollars math-verify sees the numbers in it alone: of 2^{10} a 2
    truth = truth if "$" in truth or BOX.search(truth) else f"${truth}$"
    return float(_verify(truth, response, "math_verify", tolerance=1.1e-6))


def _verify(truth: str, response: str, rm_type: str, tolerance: float) -> bool:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        cure = install_hint("math-verify")
        raise ValueError(f"--rm-type {rm_type} needs the package math-verify; {cure}") from error
    # Its time limits need SIGALRM, which works only in the main thread; rewards run in others.
    golds, answers = parse(truth, parsing_timeout=None), parse(response, parsing_timeout=None)
    if not verify(golds, answers, timeout_seconds=None):
        return False
    # It rounds to 6 decimals, so all small numbers are equal to it.
    pairs = product(map(_numbers, golds), map(_numbers, answers))
    closeness = [
        _is_close(gold, answer, tolerance) for gold, answer in pairs if gold is not None and answer is not None
    ]
    return not closeness or any(closeness)


def _numbers(parsed: Any) -> list[Any] | None:
    """Return the numbers of a parsed answer in order; None if it holds anything else.

    They are those of a number, a set, an equation for an unknown, or the finite ends of an interval.
    """
    kind = type(parsed).__name__
    if kind == "Interval":
        members = [end for end in (parsed.start, parsed.end) if end.is_finite]
    else:
        members = sorted(parsed, key=str) if kind == "FiniteSet" else [parsed]
    members = [item.rhs if type(item).__name__ == "Equality" and item.lhs.is_Symbol else item for item in members]
    values = [member if member.is_Rational else member.evalf(_DIGITS) for member in members if _is_number(member)]
    if len(values) < len(members) or not all(value.is_finite and abs(value).is_comparable for value in values):
        return None
    return sorted(values, key=lambda value: value.sort_key())


def _is_number(parsed: Any) -> bool:
    """Return whether a part of a parsed answer has a value. A percentage has two: 5 % is 5, and it is 0.05."""
    return bool(getattr(parsed, "is_number", False)) and "UnevaluatedExpr" not in {
        type(p).__name__ for p in parsed.args
    }


def _is_close(golds: Sequence[Any], answers: Sequence[Any], tolerance: float) -> bool:
    """Return whether numbers are equal in pairs: integers and fractions exactly, others to a relative tolerance."""
    if len(golds) != len(answers):
        return False
    return all(
        gold == answer if gold.is_Rational and answer.is_Rational else bool(abs(gold - answer) <= tolerance * abs(gold))
        for gold, answer in zip(golds, answers, strict=True)
    )


# -------------------------------------------------------------------------------- answers out of a box
_UNITS = (
    r"degrees?|percent|cm|(?:centi)?meters?|miles?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|feet|foot"
    r"|inch(?:es)?|yards?"
)
_REWRITES = [
    (r"\\(?:left|right)(?![a-zA-Z])", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"(?<!\\)\\[!,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", ""),
    (r"\\?[$%]", ""),
    (r"\{,\}", ","),
    # 5\text{ apples}: a text that begins with a space is a unit.
    (rf"(?<=[\d}})])\s*\\(?:text|textrm|mathrm|mbox)\{{(?:\s[^{{}}]*|(?:{_UNITS}))\}}(?:\^\{{?\d\}}?)?\s*$", ""),
    (rf"(?<=[\d}}])\s*(?:{_UNITS})(?:\^\{{?\d\}}?)?\s*$", ""),
    (r"\\text\{\s*(?:or|and)\s*\}| (?:or|and) ", ","),
    (r"\\(?:text|textbf|textrm|mathrm|mbox)\{((?:[^{}]|\{[^{}]*\})*)\}", r"\1"),
    (r"^[a-zA-Z][\w ]?=", ""),  # x = 5
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi"),
    (r"\*", r"\\cdot "),
    (r"^\s*(-?\d+)\s+(\d+)\s*/\s*(\d+)\s*$", r"\1\\frac{\2}{\3}"),  # 3 1/2
    (r"(?<![a-zA-Z0-9])\s+|\s+(?![a-zA-Z0-9])", ""),
    (r"^[({]([^(){},]*)[)}]$", r"\1"),  # (5)
    (r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\w)(?=\{)", r"\\frac{\1}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}"),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"(?<=[\w})])\.$", ""),
]
MAX_CHARACTERS = 1000  # longer answers are compared as text alone: no time goes into what cannot be meant
_IN_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
_FRACTION = re.compile(r"(-?)\\frac\{(-?)(\d+)\}\{(\d+)\}")
_INTEGER = re.compile(r"[-+]?\d+(?:\.0*)?")


def normalize_answer(answer: str) -> str:
    r"""One spelling for the many of an answer: spaces, units, `\text`, `\dfrac`, `x =`, thousands separators, case."""
    text = answer.strip()
    for pattern, new in _REWRITES:
        text = re.sub(pattern, new, text)
    return join_thousands(text.strip()).casefold()


def is_equal_answer(answer: str, truth: str) -> bool:
    r"""Return whether two answers are equal: as normalised text, else symbolically, entry by entry in (…) and […].

    The answer must have been worked out: where one side is an integer the other must be that integer (`2+2` is not
    `4`), and two plain fractions must be the same one (`2/4` is not `1/2`), as in the grader of PRM800K
    (arXiv:2305.20050).
    """
    if len(answer) <= MAX_CHARACTERS:
        answer, truth = normalize_answer(answer), normalize_answer(truth)
    if answer == truth or (bool(truth) and _is_same_text(answer, truth)):
        return bool(truth)
    if not answer or not truth or len(answer) > MAX_CHARACTERS or set("=:;") & set(answer + truth):
        return False
    brackets = [(text[0], text[-1]) for text in (answer, truth) if text[0] in "([" and text[-1] in ")]"]
    if len(brackets) == 2 and "," in answer and "," in truth:
        answer, truth = (_IN_THOUSANDS.sub("", text) for text in (answer, truth))
        entries = [_entries(text[1:-1]) for text in (answer, truth)]
        if brackets[0] != brackets[1] or len(entries[0]) != len(entries[1]):
            return False
        return all(is_equal_answer(a, b) for a, b in zip(*entries, strict=True))
    values = [read_number(text) for text in (answer, truth)]
    if isinstance(values[0], Decimal) and isinstance(values[1], Decimal):
        return is_equal_number(values[0], values[1])
    if _INTEGER.fullmatch(answer) or _INTEGER.fullmatch(truth):
        return False
    fractions = [_FRACTION.fullmatch(text) for text in (answer, truth)]
    if fractions[0] and fractions[1]:
        first, second = ((m[1] != m[2], int(m[3]), int(m[4])) for m in fractions if m)
        return first == second
    # math-verify reads a word as a product of letters, in which order does not count.
    if len(set(re.findall(r"[a-z]", re.sub(r"\\[a-z]+", "", answer + truth)))) > 2:
        return False
    return _verify(f"${truth}$", f"${answer}$", "deepscaler", tolerance=1e-12)


def _is_same_text(answer: str, truth: str) -> bool:
    """Return whether two answers without LaTeX are the same but for spaces, and braces of one character.

    A space between digits parts two numbers, but for thousands.
    """
    if "\\" in answer + truth:
        return False
    plain = [
        re.sub(r"(?<!\d)\s+|\s+(?!\d)|\s+(?=\d{3}(?!\d))", "", re.sub(r"\{(.)\}", r"\1", text))
        for text in (answer, truth)
    ]
    return plain[0] == plain[1]


def _entries(text: str) -> list[str]:
    """Return the parts between the commas outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def grade_answer_verl(solution_str: str, ground_truth: object) -> bool:
    r"""Return whether the last `\boxed{…}` of the solution equals the ground truth, which may be in a box itself."""
    box, truth = solution_str.rpartition("\\boxed"), str(ground_truth)
    answer = extract_answer("".join(box[1:])) if box[1] and box[2].startswith("{") else None
    if BOX.search(truth):
        truth = extract_answer(truth) or ""
    return answer is not None and is_equal_answer(answer, truth)


def read_truth(label: object) -> str:
    r"""Return the ground truth of a label, which may be in a box.

    Raises ValueError if no answer can equal it: it is empty, no text and no number, or a box that is empty or not
    closed.
    """
    truth = read_text(label)
    if BOX.search(truth) and not extract_answer(truth):
        raise ValueError(f"the box in the label {label!r:.80} is empty or not closed")
    return truth


def math_verl(response: str, label: object) -> float:
    """`grade_answer_verl` as a reward of 0 or 1."""
    return float(grade_answer_verl(response, label))


MATH = Reward(math_verl, read_truth, box_form=r"\boxed{%s}", package="math_verify")
MATH_VERIFY = Reward(math_reward, read_text, box_form=r"\boxed{%s}", package="math_verify")


def get_deepscaler_rule_based_reward(response: str, label: object) -> float:
    r"""1 where the last `\boxed{…}` after `</think>` (or `###Response`) equals the label; 0 without such a marker."""
    if "</think>" in response:
        solution = response.rpartition("</think>")[2]
    elif "###Response" in response:
        solution = response.split("###Response")[1]
    else:
        return 0.0
    return float(grade_answer_verl(solution, label))


DEEPSCALER = Reward(get_deepscaler_rule_based_reward, read_truth, box_form=None, package="math_verify")
