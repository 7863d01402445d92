"""Names of slime's `rm_hub` that have no function of their own in `fusionrl.rewards`."""

from __future__ import annotations

import re
import string
from collections import Counter

from fusionrl.rewards import math_utils

_CLOSED = ("yes", "no", "noanswer")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(s: str) -> str:
    """Return a text in lower case without punctuation, articles and spare spaces, as SQuAD compares answers."""
    plain = "".join(char for char in s.lower() if char not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Return F1, precision and recall of the words of an answer, as SQuAD has them.

    An answer or a truth that is yes, no or noanswer counts as a whole: it is equal, or everything is 0.
    """
    if prediction is None:
        return 0.0, 0.0, 0.0
    given, truth = normalize_answer(prediction), normalize_answer(ground_truth)
    if given != truth and (given in _CLOSED or truth in _CLOSED):
        return 0.0, 0.0, 0.0
    words, wanted = given.split(), truth.split()
    num_common = sum((Counter(words) & Counter(wanted)).values())
    if not num_common:
        return 0.0, 0.0, 0.0
    precision, recall = num_common / len(words), num_common / len(wanted)
    return 2 * precision * recall / (precision + recall), precision, recall


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{…}` or `\fbox{…}` of a text, box included; None if there is none that is closed."""
    start = max(string.rfind("\\boxed"), string.rfind("\\fbox"))
    depth = 0
    for position in range(start, len(string)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(string[position], 0)
        if string[position] == "}" and depth == 0:
            return string[start : position + 1]
    return None


def remove_boxed(s: str) -> str | None:
    r"""Return what stands in `\boxed{…}`; None where the text is no such box alone."""
    is_box = s is not None and s.startswith("\\boxed{") and s.endswith("}")
    return s[len("\\boxed{") : -1] if is_box else None


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal, symbolically too (`fusionrl.rewards.math_utils.is_equal_answer`)."""
    return math_utils.is_equal_answer(str(given_answer), str(ground_truth))


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal after both are written in one spelling."""
    return math_utils.normalize_answer(str(given_answer)) == math_utils.normalize_answer(str(ground_truth))
