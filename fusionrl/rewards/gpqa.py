"""Multiple choice, as in GPQA: the letter that a response settles on."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fusionrl.rewards.math_utils import extract_answer
from fusionrl.rewards.text import after_thinking

_STATED = (  # {noun} said of a letter: "the answer is (C)", "Answer: **C**"
    r"(?i:{noun})(?i:\s+is|\s*:|\s*=|\s+would\s+be)?[\s*_:(\[{{\"'$]*"
    r"(?i:\\(?:text|textbf|mathrm|boxed)\{{)?([{letters}])(?![\w'])"
)
_ALONE = r"^[ \t*_(\[>#]*([{letters}])(?:[ \t*_)\].]*$|[.):]\s)"


def choice_letter(response: str, letters: Sequence[str]) -> str | None:
    r"""The letter chosen: in the last box, else as last stated ("the answer is (C)"), else alone on the last such line.

    Letters count in upper case alone ("the answer is a matter of taste" chooses nothing); a box may hold either case.
    """
    boxed = re.fullmatch(
        r"(?:\\\w+\{)?\s*\(?([a-zA-Z])\)?[.:]?\s*\}?(?:[.:)]?\s.*)?", extract_answer(response) or "", re.S
    )
    if boxed and boxed[1].upper() in letters:
        return boxed[1].upper()
    allowed = "".join(letters)
    for pattern, noun in ((_STATED, "answer"), (_STATED, "option|choice"), (_ALONE, "")):
        found = re.findall(pattern.format(letters=allowed, noun=noun), response, re.MULTILINE)
        if found:
            return str(found[-1])
    return None


def compute_gpqa_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1 where the response chooses the right option, after its thinking.

    metadata  `choices` (a list, or a dict by letter), `correct_letter`; `valid_letters` where they are not A, B, C, …
    label     read where there is no `correct_letter`: a letter, the index of a choice from 0, or a choice's text

    Where no letter can be found, a response that quotes the right choice and no other is right, too.

    Raises:
        ValueError: label and metadata together name no right letter.
    """
    right, letters, texts = read_choices(label, metadata)
    answer = after_thinking(response)
    chosen = choice_letter(answer, letters)
    if chosen is not None:
        return float(chosen == right)
    quoted = [
        letter for letter, text in zip(letters, texts, strict=False) if text and f" {text} " in f" {_plain(answer)} "
    ]
    return float(quoted == [right])


def read_choices(label: object, metadata: Mapping[str, Any] | None) -> tuple[str, list[str], list[str]]:
    """Return the right letter, all letters, and the texts of the choices.

    Raises:
        ValueError: label and metadata together name no right letter, or the metadata holds no choices or letters.
    """
    metadata = metadata or {}
    choices, valid = metadata.get("choices") or [], metadata.get("valid_letters") or []
    for name, value in (("choices", choices), ("valid_letters", valid)):
        if not isinstance(value, Collection):
            raise ValueError(f"metadata {name} {value!r} is no list")
    default = list(choices) if isinstance(choices, dict) else string.ascii_uppercase[: len(choices) or 10]
    letters = [str(letter).upper() for letter in valid or default]
    texts = [_plain(str(text)) for text in (choices.values() if isinstance(choices, dict) else choices)]
    return _right_letter(label, metadata.get("correct_letter"), letters, texts), letters, texts


def _right_letter(label: object, correct: object, letters: list[str], texts: list[str]) -> str:
    for named in (correct, label):
        if isinstance(named, str) and named.strip().upper() in letters:
            return named.strip().upper()
    if isinstance(label, int) and 0 <= label < len(letters):
        return letters[label]
    if isinstance(label, str) and _plain(label) in texts[: len(letters)]:
        return letters[texts.index(_plain(label))]
    raise ValueError(
        f"the label {label!r} and metadata correct_letter {correct!r} name none of the letters {', '.join(letters)}"
    )


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+(?:\.[a-z0-9]+)*", text.lower()))
