"""Multiple choice, as in GPQA: the letter that a response settles on."""

import re
import string
from collections.abc import Collection, Mapping
from typing import Any

from fusionrl.rewards.registry import Reward

_NOUNS = ("answer", "option", "choice")
_IS_THE_ONE = ["is", "the", "correct"]
_TOKEN = re.compile(r"[A-Za-z]+|\d+|\S")


def choice_letter(response: str, letters: Collection[str]) -> str | None:
    """The letter chosen: as first stated ("the answer is (C)", "answer: c", "C is correct"), else the last capital that
    stands alone."""
    tokens = _TOKEN.findall(response)
    words = [token.lower() for token in tokens]
    for place, token in enumerate(tokens):
        if words[place] in _NOUNS:
            letter = _letter_behind(tokens, place + 1)
        else:
            is_said = words[place + 1 : place + 3] == ["is", "correct"] or words[place + 1 : place + 4] == _IS_THE_ONE
            letter = token.upper() if is_said and len(token) == 1 else None
        if letter in letters:
            return letter
    alone = [letter for letter in re.findall(r"\b([A-Z])\b", response) if letter in letters]
    return str(alone[-1]) if alone else None


def _letter_behind(tokens: list[str], place: int) -> str | None:
    """The letter that follows, but for "is" and signs; an "a" before a word is an article."""
    while place < len(tokens) and (tokens[place].lower() == "is" or not tokens[place].isalnum()):
        place += 1
    if place == len(tokens) or len(tokens[place]) > 1 or not tokens[place].isalpha():
        return None
    is_article = tokens[place].islower() and place + 1 < len(tokens) and tokens[place + 1].isalpha()
    return None if is_article else tokens[place].upper()


def compute_gpqa_reward(response: str, label: object, metadata: Mapping[str, object] | None = None) -> float:
    """1 where the response chooses the right option, after its thinking.

    metadata  `choices` (a list, or a dict by letter), `correct_letter`; `valid_letters` where they are not A, B, C, …
    label     read where there is no `correct_letter`: a letter, the index of a choice from 0, or a choice's text

    Where no letter can be found, a response that quotes the right choice is right, too: its text, the label's, or
    `correct_answer` or `answer_text` of the metadata. Raises ValueError if label and metadata together name no right
    letter.
    """
    right, letters, texts = read_choices(label, metadata)
    answer = response.rpartition("</think>")[2]
    chosen = choice_letter(answer, letters)
    if chosen is not None:
        return float(chosen == right)
    quoted = [text for letter, text in zip(letters, texts, strict=False) if letter == right]
    quoted += [_plain(str((metadata or {}).get(name) or "")) for name in ("correct_answer", "answer_text")]
    if isinstance(label, str) and len(label.strip()) > 1:  # a letter is in most words
        quoted.append(_plain(label))
    return float(any(text and text in _plain(answer) for text in quoted))


def read_choices(label: object, metadata: Mapping[str, Any] | None) -> tuple[str, list[str], list[str]]:
    """Return the right letter, all letters, and the texts of the choices.

    Raises ValueError if label and metadata together name no right letter, or the metadata holds no choices or letters.
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
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


GPQA = Reward(compute_gpqa_reward, read_choices, reads_metadata=True)
