"""Rewards of written programs: the last ```python block of a response against unit tests, in the sandbox.

A test set is a dict, or its JSON, in one of these forms:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}               a program's input and output (APPS, arXiv 2105.09938)
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}    calls of a function, or of a method of `Solution`
    {"asserts": ["assert add(1, 2) == 3"], "setup": "..."}    statements after the program, each a test (MBPP)

or a list of assert statements. Every test is a run of its own; the program's process never holds the expected value.
"""

import re
from collections import Counter, deque

from fusionrl.rewards.code_labels import read_tests
from fusionrl.rewards.code_run import run_test
from fusionrl.rewards.grader import CodeGrade, Grader

# A fence may be in a list item: behind its bullet, or indented below it.
_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)```(?:python3?|py)[ \t]*\n(?P<text>.*?)^[ \t]*```",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def grade_share(response: str, label: object) -> CodeGrade:
    """Share of the tests of `label` that the last Python block of the response passes.

    Raises ValueError if the label is not a test set; SandboxError if the sandbox does not work.
    """
    tests = read_tests(label)
    program = last_python_block(response)
    if program is None:
        return CodeGrade(0.0, {"no_program": len(tests)})
    reasons = [run_test(program, test) for test in tests]
    return CodeGrade(reasons.count(None) / len(tests), dict(Counter(reason for reason in reasons if reason)))


def grade_all(response: str, label: object) -> CodeGrade:
    """1 where it passes all of them, else 0; the first test that fails ends it."""
    tests = read_tests(label)
    program = last_python_block(response)
    if program is None:
        return CodeGrade(0.0, {"no_program": 1})
    for test in tests:
        if reason := run_test(program, test):
            return CodeGrade(0.0, {reason: 1})
    return CodeGrade(1.0, {})


def last_python_block(response: str) -> str | None:
    """Return the text of the last closed ```python block; None without one.

    Its lines lose the indentation of the fence, as far as the first line has it.
    """
    blocks = deque(_BLOCK.finditer(response.replace("\r\n", "\n")), maxlen=1)
    if not blocks:
        return None
    text = blocks[0]["text"]
    first = text.lstrip("\n")
    width = min(len(blocks[0]["indent"]), len(first) - len(first.lstrip(" \t")))
    return re.sub(rf"^[ \t]{{1,{width}}}", "", text, flags=re.MULTILINE) if width else text


CODE = Grader(grade_share, read_tests, is_slow_to_check=True, runs_programs=True)
CODE_ALL = Grader(grade_all, read_tests, is_slow_to_check=True, runs_programs=True)
