"""The scoring of DAPO's mathematical questions (arXiv:2503.14476), whose answers are short, mostly integers.

An answer stands after "Answer:", as DAPO's prompt asks. It is compared as text, after the normalisation of Minerva
(arXiv:2206.14858, appendix D.1).
"""

import re

from fusionrl.rewards.numbers import join_thousands
from fusionrl.rewards.registry import Reward, extract_answer
from fusionrl.rewards.text_match import read_text

TAIL_CHARACTERS = 300  # only the end of a response is searched, so that a long one cannot list many answers
BOX_TAIL_CHARACTERS = 100

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = {
    "an ": "",
    "a ": "",
    ".$": "$",
    r"\$": "",
    r"\ ": "",
    " ": "",
    "mbox": "text",
    r",\text{and}": ",",
    r"\text{and}": ",",
    r"\text{m}": r"\text{}",
}
# In this order: "\text{}^2" and "\text{}" may come about by what was removed before them.
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
    *("<|im_end|>", "<|endoftext|>"),  # kept in the text by --no-rollout-skip-special-tokens
)


def normalize_final_answer(answer: str) -> str:
    """An answer without units, articles, spaces and LaTeX's decoration; of an equation, the right side."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED.items():
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    answer = re.sub(r".*?\$(.*?)\$.*", r"$\1$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)  # \frac12
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    return join_thousands(answer.strip())


def compute_score(solution: str, ground_truth: object, strict_box_verify: bool = False) -> dict[str, object]:
    r"""DAPO's score of a solution.

    strict_box_verify  only a `\boxed{…}` at the very end counts, and must be the ground truth to the letter

    Returns `{"score": 1.0 or -1.0, "acc": bool, "pred": the answer found, or None}`: choose with --reward-key.
    """
    tail, truth = solution[-TAIL_CHARACTERS:], _without_zero_decimals(str(ground_truth).strip())
    pred: str | None
    if strict_box_verify:
        pred = extract_answer(tail[-BOX_TAIL_CHARACTERS:])
        is_right = pred is not None and pred == truth
    else:
        answers = _ANSWER.findall(tail)
        pred = normalize_final_answer(answers[-1]) if answers else None
        is_right = pred is not None and pred == _without_zero_decimals(normalize_final_answer(truth))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def _without_zero_decimals(text: str) -> str:
    """34.0 → 34: a column of integers with a gap is read as floats."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)


DAPO = Reward(compute_score, read_text, label="answer", box_form="Answer: %s", dict_key="score")
