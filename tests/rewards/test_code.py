"""The code reward on right, wrong and dishonest programs, run in the sandbox."""

import json
from dataclasses import replace
from decimal import Decimal, localcontext
from typing import Any

import pytest

from fusionrl.rewards import code as code_reward
from fusionrl.rewards.code import is_same_output, last_python_block
from fusionrl.rewards.registry import grade

STDIN = {"inputs": ["1 2\n", "5 7\n"], "outputs": ["3\n", "12"]}
CALL = {"inputs": [[[3, 1, 2]], [[]]], "outputs": [[1, 2, 3], []], "fn_name": "order"}


def code(response: str, label: Any, rm_type: str = "code") -> Any:
    return grade(rm_type, response, label).reward


def block(source: str) -> str:
    return f"I think:\n```python\nraise SystemExit(9)\n```\nNo, rather:\n```python\n{source}\n```\nThat is it."


@pytest.mark.parametrize(
    ("source", "label", "share"),
    [
        ("print(sum(map(int, input().split())))", STDIN, 1.0),
        ("a, b = input().split()\nprint(float(a) + float(b))", STDIN, 1.0),
        ("print(3)", STDIN, 0.5),
        ("if __name__ == '__main__': print(sum(map(int, input().split())))", json.dumps(STDIN), 1.0),
        ("print(sum(map(int, input().split()))); raise SystemExit(1)", STDIN, 0.0),
        ("print('Yes\\n2')", {"inputs": [["a", "b"]], "outputs": [["Yes", "2"]]}, 1.0),
        ("def order(x): return sorted(x)", CALL, 1.0),
        ("class Solution:\n    def order(self, x: List[int]): return sorted(x)", CALL, 1.0),
        ("def other(x): return x", CALL, 0.0),
        ("def order(x): return (1, 2, 3)\nif __name__ == '__main__': input()", CALL, 0.5),
        ("def add(a, b): return a + b", {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, 1.0),
        ("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], 0.5),
        ("def f(): return N", {"asserts": ["assert f() == 4"], "setup": "N = 4"}, 1.0),
    ],
)
def test_share_of_passed_tests(source: str, label: Any, share: float) -> None:
    assert code(block(source), label) == share


def test_all_tests_or_nothing() -> None:
    for source, reward in (("print(sum(map(int, input().split())))", 1.0), ("print(3)", 0.0), ("print(0)", 0.0)):
        assert code(block(source), {"inputs": ["1 2", "0 0"], "outputs": ["3", "0"]}, "code_all") == reward


def test_a_program_that_hangs_fails_its_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_reward, "LIMITS", replace(code_reward.LIMITS, cpu_s=1))
    source = "n = int(input())\nwhile n: pass\nprint(n)"
    assert code(block(source), {"inputs": ["0", "1"], "outputs": ["0", "1"]}) == 0.5


def test_the_last_closed_block_counts() -> None:
    assert last_python_block("```python\na\n```\n```py\nb\n```\n```\nc\n```\n```python\nnever closed") == "b\n"
    assert last_python_block("  ```Python\n  a\n  ```") == "a\n"
    assert last_python_block("no code") is None
    assert code("no code", STDIN) == code("no code", STDIN, "code_all") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "1. Read it:\n\n   ```python\n   n = int(input())\n   if n:\n       print(n + 1)\n   ```\n",
        "- ```py\n  n = int(input())\n  if n:\n      print(n + 1)\n  ```",
        "10) ```python3\n    n = int(input())\n    print(n + 1)\n    ```",
        "\t```python\n\tn = int(input())\n\tprint(n + 1)\n\t```",
        "Here:\r\n```python\r\nn = int(input())\r\nprint(n + 1)\r\n```\r\nDone.",
        "  ```python\nn = int(input())\nif n:\n  print(n + 1)\n  ```",  # the fence alone is indented
        "1. ```python\nn = int(input())\nif n:\n  print(n + 1)\n```",
        '   ```python\n   t = """\n   x\n"""\n   print(int(input()) + len(t) - 2)\n   ```',
    ],
)
def test_a_program_in_a_list_item_or_with_crlf_runs(response: str) -> None:
    printed: list[int] = []
    exec(str(last_python_block(response)), {"input": lambda: "4", "print": printed.append})
    assert printed == [5]


def test_numbers_of_many_digits_are_printed_and_compared() -> None:
    with localcontext(prec=7000):
        two_to_the_20000 = str(Decimal(2) ** 20000)
    assert code(block("print(2**20000)"), {"inputs": [""], "outputs": [two_to_the_20000]}) == 1.0
    assert code(block("print(int(input()) + 1)"), {"inputs": ["9" * 6000], "outputs": ["1" + "0" * 6000]}) == 1.0
    assert code(block("f = lambda n: str(7**n)"), {"asserts": ["assert len(f(6000)) == 5071"]}) == 1.0


def test_words_of_an_output() -> None:
    for output, expected in (("1.0", "1.00"), ("1e3", "1000"), ("1_000", "1_000"), ("-0", "0")):
        assert is_same_output(output, expected)
    assert not is_same_output("1_000", "1000") and not is_same_output("1000", "1_000")
