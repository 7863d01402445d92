"""Rewards that compare words, one for the form of a response, and a coin."""

import random
import re
import string
from collections import Counter
from collections.abc import Mapping

from fusionrl.rewards.registry import Reward


def after_thinking(response: str) -> str:
    """Return the text after the last `</think>`; nothing if the thinking never ended; all of it if there is none."""
    if "</think>" in response:
        return response.rpartition("</think>")[2]
    return "" if response.lstrip().startswith("<think>") else response


def read_text(label: object) -> str:
    """Return a label that answers are compared with as text.

    Raises ValueError if it is neither text nor a number, or empty: no answer is meant to equal it.
    """
    if label is None:
        raise ValueError("there is no label (null, or --label-key names no column of the row)")
    if not isinstance(label, str | int | float):
        raise ValueError(f"the label {label!r:.80} is neither text nor a number")
    if not str(label).strip():
        raise ValueError("the label is empty")
    return str(label)


def exact(response: str, label: object) -> float:
    """1 where the response, stripped, is the label."""
    return float(response.strip() == str(label).strip())


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})


def f1(response: str, label: object) -> float:
    """Word-level F1 of the response against the label, as in SQuAD."""
    return f1_score(response, str(label))[0]


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Return F1, precision and recall of the words of an answer, as SQuAD has them.

    An answer or a truth that is yes, no or noanswer counts as a whole: it is equal, or everything is 0.
    """
    if prediction is None:
        return 0.0, 0.0, 0.0
    predicted, truth = normalize_answer(prediction), normalize_answer(ground_truth)
    if predicted != truth and not _WHOLE_ANSWERS.isdisjoint((predicted, truth)):
        return 0.0, 0.0, 0.0
    words, expected_words = predicted.split(), truth.split()
    num_common = sum((Counter(words) & Counter(expected_words)).values())
    if not num_common:
        return 0.0, 0.0, 0.0
    precision, recall = num_common / len(words), num_common / len(expected_words)
    return 2 * precision * recall / (precision + recall), precision, recall


def normalize_answer(s: str) -> str:
    """Return a text in lower case without punctuation, articles and spare spaces, as SQuAD compares answers."""
    plain = "".join(char for char in s.lower() if char not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def random_reward(response: str, label: object) -> float:
    """0 or 1 by a coin: a control experiment."""
    return float(random.random() < 0.5)


_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(response: str, label: object, metadata: Mapping[str, object] | None = None) -> float:
    """1 where the whole response is `<think>…</think><answer>…</answer>`, each tag once and neither part empty.

    The opening `<think>` may be missing: many chat templates end the prompt with it. `format_regex` in the metadata
    (--rm-format-regex sets it for all samples) asks for that form instead; it must match the whole response, stripped.
    """
    regex = (metadata or {}).get("format_regex")
    if regex:
        return float(re.fullmatch(str(regex), response.strip(), re.DOTALL) is not None)
    text = response.strip()
    thinking, _, rest = text.removeprefix("<think>").partition("</think>")
    answer = rest.strip().removeprefix("<answer>").removesuffix("</answer>")
    is_wrapped = rest.strip() == f"<answer>{answer}</answer>"
    has_one_each = all(text.count(tag) <= 1 for tag in _TAGS) and "<think>" not in thinking + answer
    return float(is_wrapped and has_one_each and bool(thinking.strip()) and bool(answer.strip()))


EXACT = Reward(exact, read_text, label="answer")
F1 = Reward(f1, lambda label: label == "" or read_text(label))  # empty: no answer, as in SQuAD 2
RANDOM = Reward(random_reward, label="unread")
FORMAT = Reward(format_reward, label="unread", reads_metadata=True)
