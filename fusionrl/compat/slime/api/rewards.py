"""Names of `slime.rollout.rm_hub` without a function of their own in `fusionrl.rewards`."""

from fusionrl.rewards import math_utils


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
    r"""Return the content of `\boxed{…}`; None unless the text is exactly such a box."""
    is_box = s is not None and s.startswith("\\boxed{") and s.endswith("}")
    return s[len("\\boxed{") : -1] if is_box else None


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal, symbolically too (`fusionrl.rewards.math_utils.is_equal_answer`)."""
    return math_utils.is_equal_answer(str(given_answer), str(ground_truth))


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal after both are written in one spelling."""
    return math_utils.normalize_answer(str(given_answer)) == math_utils.normalize_answer(str(ground_truth))
