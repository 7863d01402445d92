"""The built-in rewards, on answers as models give them."""

from __future__ import annotations

import threading

import pytest

from fusionrl.rewards.registry import RM_TYPES


@pytest.mark.parametrize(
    ("kind", "response", "label", "wanted"),
    [
        ("exact", " 42\n", "42", 1.0),
        ("exact", "42.", "42", 0.0),
        ("exact", "42", 42, 1.0),
        ("last_number", "first 3, then 1,234.50", "1234.5", 1.0),
        ("last_number", "the answer is -7.", -7, 1.0),
        ("last_number", "7 or 8", "7", 0.0),
        ("last_number", "none at all", "7", 0.0),
        ("f1", "The cat sat!", "cat sat", 1.0),
        ("f1", "a dog", "cat", 0.0),
        ("f1", "red cat", "blue cat", 0.5),
    ],
)
def test_grades(kind: str, response: str, label: object, wanted: float) -> None:
    assert RM_TYPES[kind](response, label) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("2^{10}", "1024", "2"),
        ("x^2+1", "1+x^2", "1"),
        ("1,234", "1234", "234"),
        ("$\\frac{1}{2}$", "0.5", "2"),
        (3.5, "7/2", "5"),
    ],
)
def test_labels_of_math(label: object, right: str, wrong: str) -> None:
    pytest.importorskip("math_verify")
    assert RM_TYPES["math_verify"](rf"so \boxed{{{right}}}", label) == 1.0
    assert RM_TYPES["math_verify"](rf"so \boxed{{{wrong}}}", label) == 0.0


def test_math_in_a_thread() -> None:
    """Rewards run beside the main thread, where math-verify's own time limits do not work."""
    pytest.importorskip("math_verify")
    grades: list[float] = []

    def run() -> None:
        grades.append(RM_TYPES["math_verify"](r"so the answer is \boxed{\frac{1}{2}}", "0.5"))
        grades.append(RM_TYPES["math_verify"](r"so the answer is \boxed{3}", r"\frac{6}{2}"))
        grades.append(RM_TYPES["math_verify"](r"so the answer is \boxed{4}", "5"))
        grades.append(RM_TYPES["math_verify"]("no answer", "5"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert grades == [1.0, 1.0, 0.0, 0.0]
