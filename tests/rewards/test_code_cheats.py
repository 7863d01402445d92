"""Cheats score 0 in every form of a test; honest programs of every kind still score 1."""

import json
from typing import Any
from unittest.mock import Mock

import pytest

from fusionrl.buffer.rollout_report import rollout_metrics
from fusionrl.data.sample import Sample
from fusionrl.rewards import code
from fusionrl.rewards.code import grade_all, grade_share
from fusionrl.rewards.code_tests import CallTest, ExpressionTest, read_tests
from fusionrl.rewards.plain_data import wire_of
from fusionrl.rewards.registry import REASONS
from fusionrl.rewards.reward_call import RewardCall, Scorer, call_reward
from fusionrl.sandbox import SandboxError
from tests.rewards.cheats import AS_PROGRAMS, CHEATS, EXPECTED, FEW_QUESTIONS, LABELS, NO_ANSWER


def block(source: str) -> str:
    return f"```python\n{source}\n```"


def test_the_task_itself_can_be_solved() -> None:
    function = f"def f(x): return {EXPECTED} // x * x + {EXPECTED % 20}"
    for form, label in LABELS.items():
        program = f"{function}\nif __name__ == '__main__': print(f(int(input())))"
        assert grade_share(block(program), label) == (1.0, {}), form


def forms_of(name: str) -> list[str]:
    """Forms of the test for a cheat: each comparison where an answer or a helper is odd or forged, else two ways.

    Of both forms that need a judge, `check` shows the program more of the label.
    """
    if name.startswith(("equals", "is a", "claims", "answers", "replaces", "defines", "says", "writes")):
        return [form for form in LABELS if form != "judged"]
    return ["check", "input" if name in AS_PROGRAMS else "assert"]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_scores_nothing(name: str) -> None:
    for form in forms_of(name):
        reward, failures = grade_all(block(CHEATS[name]), LABELS[form])
        assert reward == 0.0, form
        assert sum(failures.values()) == 1 and set(failures) <= set(REASONS), (form, failures)


@pytest.mark.parametrize("name", NO_ANSWER)
def test_a_program_that_does_not_answer_passes_no_test_of_few_questions(name: str) -> None:
    for statement in FEW_QUESTIONS:
        calls = "f(20)" in statement
        if calls == (name in ("exits when called", "answers with an object")) or name == "exits":
            _, failures = grade_share(block(NO_ANSWER[name]), [statement])
            assert sum(failures.values()) == 1, statement


def test_an_object_cannot_hand_the_judge_memory() -> None:
    """numpy would read from any address that an object names; the attributes that name it are never asked for."""
    source = (
        "class A:\n    __array_interface__ = {'data': (1, False), 'shape': (4,), 'typestr': '<f8', 'version': 3}\n"
        "    def __array__(self, *a, **k): return 3\ndef f(): return A()"
    )
    for statement in ("assert np.allclose(f(), [1, 2, 3, 4])", "x = f()\nassert x.__array_interface__['data']"):
        assert grade_share(block(source), [statement, "assert f()"]).failures == {"object": 1}, statement


def test_failures_are_counted_by_reason() -> None:
    source = (
        "import os, sys, time\nn = int(input())\n"
        "if n == 1: print(1)\nif n == 2: 1 / 0\nif n == 3: os.kill(os.getpid(), 40)\n"
        "if n == 4: sys.stdout.write('x' * (5 << 20))\nif n == 5: print(7)\n"
    )
    label = {"inputs": ["1", "2", "3", "4", "5", "5"], "outputs": ["1"] * 6}
    assert grade_share(block(source), label) == (1 / 6, {"error": 1, "signal": 1, "output": 1, "wrong": 2})
    assert grade_share("no code", label) == (0.0, {"no_program": 6})
    for source, reason in (
        ("def f(): return object()", "object"),
        ("raise SystemExit(0)", "no_answer"),
        ("def f(): return 10 ** 5000", "wrong"),
        ("import os\nos.write(3, b'[' * 100000 + b'\\n'); os._exit(0)", "output"),
        ("import os\nos.write(3, b'9' * 5000 + b'\\n'); os._exit(0)", "output"),
        ("import os\nos.write(3, b'\\xff\\n'); os._exit(0)", "output"),
    ):
        assert grade_share(block(source), ["assert f() == 3"]).failures == {reason: 1}, source


LINKED = "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
LINKED += "def value(node): return node.value\n"
HONEST: dict[str, tuple[str, Any]] = {
    "prints, threads and atexit": (
        "import atexit, threading\natexit.register(print, 'end')\nthreading.Thread(target=print, args=('x',)).start()\n"
        "print('noise')\ndef f(x): print('more'); return x + 1",
        ["assert f(1) == 2"],
    ),
    "a Counter, a namedtuple, an enum, a bool": (
        "import collections, enum\nclass E(enum.IntEnum):\n    A = 3\nP = collections.namedtuple('P', 'x y')\n"
        "def c(s): return collections.Counter(s)\ndef p(): return P(1, 2)\ndef e(): return E.A\ndef b(): return 1",
        ["assert c('aab') == {'a': 2, 'b': 1}", "assert p() == (1, 2)", "assert e() == 3", "assert b() == True"],
    ),
    "numbers of every kind": (
        "import numpy\nfrom fractions import Fraction\nfrom decimal import Decimal\n"
        "def v(): return numpy.int64(3), numpy.float32(0.5), Fraction(1, 2), Decimal('0.5'), 1 + 2j\n"
        "def n(): return 7 ** 3000\ndef t(): return numpy.bool_(True)",
        [
            *("assert v() == (3, 0.5, 0.5, 0.5, 1 + 2j)", "assert n() == 7 ** 3000"),
            *("assert not not t()", "assert t() is True"),
        ],
    ),
    "sets, bytes, None and nested data": (
        "def s(x): return set(x)\ndef b(): return b'ab'\ndef o(): return None\ndef d(): return {(1, 2): [3, {4}]}\n"
        "def m(x): import re; return re.match('a', x)",
        [
            *("assert s([]) == set()", "assert b() == b'ab'", "assert o() is None", "assert not m('b')"),
            *("assert d() == {(1, 2): [3, {4}]}", "assert sorted(s([2, 1])) == [1, 2]", "assert m('abc')"),
        ],
    ),
    "arrays": (
        "import numpy as np\ndef f(n): return np.arange(n) * 2.0\ndef m(): return np.eye(2, dtype=bool)\n"
        "def fill(a): a[:] = 7",
        [
            "assert (f(2) == np.array([0.0, 2.0])).all() and np.allclose(f(3), [0, 2, 4]) and f(2).dtype == np.float64",
            "assert m().shape == (2, 2) and np.array_equal(m(), np.eye(2))",
            "a = np.zeros(3)\nfill(a)\nassert a.sum() == 21 and np.isclose(f(2)[1], 2)",
        ],
    ),
    "deques, dates and views of dicts": (
        "from collections import deque\nfrom datetime import *\ndef q(x): return deque(x, 3)\n"
        "def day(): return date(2024, 2, 29)\ndef now(): return datetime(2024, 1, 2, 3, tzinfo=timezone.utc)\n"
        "def wait(): return timedelta(days=1, seconds=2)\ndef k(d): return d.keys()\ndef i(d): return d.items()",
        {
            "setup": "from collections import deque\nfrom datetime import date, datetime, timedelta, timezone",
            "asserts": [
                "assert q([1, 2]) == deque([1, 2]) and q(deque([5])).maxlen == 3",
                "assert day() == date(2024, 2, 29) and day() < date(2025, 1, 1)",
                "assert now() == datetime(2024, 1, 2, 3, tzinfo=timezone.utc) and wait() == timedelta(1, 2)",
                "x = {1: 2}\nassert k(x) == x.keys() and i(x) == x.items()",
                *("assert k({1: 2}) == {1}", "assert i({1: 2}) == {(1, 2)}"),
            ],
        },
    ),
    "globals": (
        "x = 5\ny = [1, 2]\ncount = 0\ndef add():\n    global count\n    count += 1\n    y.append(3)",
        [
            *("assert x == 5", "assert x + 1 == 6 and y == [1, 2] and 2 in y and y + [4] == [1, 2, 4]"),
            "assert count == 0\nadd()\nassert count == 1 and y == [1, 2, 3] and len(y) == 3",
            "y.append(9)\nassert y[-1] == 9 and [1, 2, 9] == y",
        ],
    ),
    "classes": (
        "class P: pass\nclass Q(P): pass\ndef f(): return Q()",
        ["assert isinstance(f(), P)", "assert issubclass(Q, P) and not isinstance(P(), Q)", "assert callable(f)"],
    ),
    "generators": (
        "def g(n): yield from range(n)\ndef z(): return zip([1], [2])",
        ["assert list(g(3)) == [0, 1, 2]", "assert [x for x in z()] == [(1, 2)]"],
    ),
    "closeness without an import": ("def f(r): return 3.0 * r", ["assert math.isclose(f(2), 6.0)"]),
    "HumanEval's check": (
        "def add(a, b):\n    return a + b",
        {"setup": "def check(g):\n    for a in range(3):\n        assert g(a, 1) == a + 1", "asserts": ["check(add)"]},
    ),
    "errors that are wanted": (
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
        ["try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False", "assert root(4) == 2"],
    ),
    "a class with state": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x); return self\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __getitem__(self, i): return self.items[i]",
        [
            "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s) == s[0] == 1 and s.items == [1]",
            "assert Stack().push(3).pop() == 3",
        ],
    ),
    "what is changed in place": ("def order(x): x.sort()", ["x = [3, 1]\norder(x)\nassert x == [1, 3]"]),
    "objects of the setup": (
        "def last(n):\n    while n.next: n = n.next\n    return n.value\ndef rest(n): return n.next",
        {
            "setup": LINKED,
            "asserts": ["assert last(Node(1, Node(2))) == 2", "assert value(rest(Node(1, Node(2)))) == 2"],
        },
    ),
    "functions as arguments": ("def twice(g, x): return g(g(x))", ["assert 0 < twice(lambda x: x * 2, 1) < 5"]),
    "names of builtins": ("def sum(a, b): return a * b", ["assert abs(sum(1, 2)) < 3"]),
    "a name of a module": ("def bisect(a, x): return a.index(x)", ["assert bisect([5, 6], 6) == 1"]),
    "answers of answers": ("def e(x): return x[::-1]", ["assert e(e('abc')) == e(e(e(e('abc'))))"]),
    "the other way round": ("def f(): return [1, (2, 3)]", ["assert [1, (2, 3)] == f()"]),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(20000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
        ["assert f(9000) == 9000"],
    ),
    "one text of asserts": ("def f(x): return x", "assert f(1) == 1\nassert f(2) == 2"),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name: str) -> None:
    source, label = HONEST[name]
    label = {"asserts": label} if isinstance(label, str) else label
    assert grade_share(block(source), label) == (1.0, {})


@pytest.mark.parametrize(
    ("answer", "statement"),
    [
        ([1, 2], "assert f() == (1, 2)"),
        ({1: 2}, "assert f() == {'1': 2}"),
        ("3", "assert f() == 3"),
        (1, "assert f() is True"),
        ([0], "assert not f()"),
        (0.1 + 0.2, "assert f() == 0.3"),
        (float("nan"), "assert f() == float('nan')"),
    ],
)
def test_types_count_in_asserts(answer: Any, statement: str) -> None:
    assert not is_expected(answer, [statement])


def is_expected(answer: Any, label: Any) -> bool:
    """Compare an answer, as a program's process hands it over, with what a label of one test wants."""
    (test,) = read_tests(label)
    assert isinstance(test, CallTest | ExpressionTest)
    return code._is_expected(json.loads(json.dumps(wire_of(answer))), test)


NUMBERS = [
    ("assert abs(f() - 3.1) < 0.2 and not f() > 4", 3, True),
    ("assert math.isclose(f(), 3.0, rel_tol=1e-3)", 3.0001, True),
    ("assert 1 < f() <= 3", 3.5, False),
    ("assert round(f(), 2) == 3.14 or f() / 0 == 1", 3.14159, True),
    ("assert f() / 0 == 1 or True", 3, False),
    ("assert abs(f() - 3) < 1", float("nan"), False),
    ("assert f() < 3", "2", False),
    ("assert f() > 10 ** 400", 10**401, True),
]


@pytest.mark.parametrize(("statement", "answer", "passes"), NUMBERS)
def test_asserts_over_numbers(statement: str, answer: Any, passes: bool) -> None:
    """As Python itself says."""
    program = f"nan = float('nan')\ndef f(): return {answer!r}"
    try:
        exec(f"import math\n{program}\n{statement}", {})
        python = True
    except (AssertionError, ArithmeticError, TypeError):
        python = False
    assert python is passes
    assert grade_share(block(program), [statement]).reward == float(passes)


def test_a_math_of_the_setup_is_not_taken_for_the_module() -> None:
    setup = "class math:\n    isclose = staticmethod(lambda a, b: a == b + 1)"
    label = {"setup": setup, "asserts": ["assert math.isclose(f(), 3)"]}
    assert grade_share(block("def f(): return 4"), label).reward == 1


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ({1: 2}, {"1": 2}, True),
        (1.0, 1, True),
        (True, 1, False),
        ("1", 1, False),
        ({1, 2}, [1, 2], False),
        (5, [5], True),
        (None, None, True),
    ],
)
def test_calls_compare_as_json(answer: Any, expected: Any, same: bool) -> None:
    assert is_expected(answer, {"inputs": [[]], "outputs": [expected], "fn_name": "f"}) is same


@pytest.mark.parametrize(
    ("label", "part"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (3, "the label is int"),
        ({"x": 1}, r"the label has \['x'\]"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"asserts": "assert f( == 1"}, "is not Python"),
        ({"asserts": ["assert f() == 1", 3]}, "neither text nor a list of texts"),
        ({"asserts": ["assert f() == 1\0"]}, "is not Python"),
        ({"asserts": ["assert f() == 1"], "setup": "def"}, "is not Python"),
        ({"asserts": "  "}, "no tests"),
        ({"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}, "input or output 0 of the label is unreadable"),
    ],
)
def test_labels_that_cannot_be_read(label: Any, part: str) -> None:
    for grade in (grade_share, grade_all):
        with pytest.raises(ValueError, match=f"--rm-type code: .*{part}"):
            grade("no code", label)


def test_a_program_that_ends_its_sandbox_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the weak mode without Landlock a program may kill its launcher. A sandbox that is broken is another thing."""

    lost = Mock(side_effect=SandboxError("the sandbox gave no report: its launcher was killed"))
    monkeypatch.setattr(code, "_run_asking", lost)
    assert grade_share(block("x"), ["assert f() == 1"]) == (0.0, {"sandbox": 1})
    monkeypatch.setattr(code, "probe", lost)
    with pytest.raises(SandboxError, match="launcher was killed"):
        grade_share(block("x"), ["assert f() == 1"])


def test_a_judge_without_pipes_is_an_error_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.pipe", Mock(side_effect=OSError(24, "Too many open files")))
    with pytest.raises(SandboxError, match="Too many open files"):
        grade_share(block("def f(): pass"), ["assert callable(f)"])


def test_reasons_reach_the_sample_and_the_metrics() -> None:
    scorer = Scorer(None, "code+format:0.1", "")
    metadata = {"shared": 1}
    samples = [
        Sample(index=i, response=block(f"def f(): return {i}"), label=["assert f() == 1"] * 2, metadata=metadata)
        for i in range(3)
    ]
    rewards = [call_reward(RewardCall(scorer, [sample], allow_weak_sandbox=True)) for sample in samples]
    assert rewards == [0.0, 1.0, 0.0]
    assert [sample.metadata.get("code_failures") for sample in samples] == [{"wrong": 2}, None, {"wrong": 2}]
    assert metadata == {"shared": 1}, "the samples of a group share it"
    failed = {name: value for name, value in rollout_metrics(samples, rewards).items() if "code_failed" in name}
    assert failed == {"rollout/code_failed/wrong": 2.0}
