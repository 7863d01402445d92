"""Rewards of written programs: the last ```python block of a response against unit tests, in the sandbox.

A test set is a dict, or its JSON, in one of these forms:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}               a program's input and output (APPS, arXiv 2105.09938)
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}    calls of a function, or of a method of `Solution`
    {"asserts": ["assert add(1, 2) == 3"], "setup": "..."}    statements after the program, each a test (MBPP)

or a list of assert statements. Every test is a run of its own: a process that has the inputs and nothing that is
expected of it hands over values (see `plain_data`), and another process compares: this one, or a judge's in a sandbox.
"""

import json
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path

from fusionrl.rewards.code_tests import (
    CallTest,
    ExpressionTest,
    InputTest,
    JudgedTest,
    Test,
    read_tests,
)
from fusionrl.rewards.plain_data import NoPlainData, Unreadable, canonical, read_answer, truth
from fusionrl.rewards.registry import CodeGrade, Reward
from fusionrl.sandbox import Limits, SandboxError, SandboxResult, probe
from fusionrl.sandbox.run import Run

LIMITS = Limits(wall_s=20.0, cpu_s=6, memory_bytes=1 << 30, output_bytes=4 << 20)
ANSWER_BYTES = 4 << 20

_HARNESS = Path(__file__).with_name("harness")
_PROGRAM = "\n".join((_HARNESS / name).read_text() for name in ("wire.py", "program.py"))
_JUDGE = "\n".join((_HARNESS / name).read_text() for name in ("wire.py", "judge.py"))
# Solutions in the manner of LeetCode use these without an import.
_IMPORTS = "import collections, functools, heapq, itertools, math, re\nfrom typing import *\n"

# A fence may be in a list item: behind its bullet, or indented below it.
_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)```(?:python3?|py)[ \t]*\n(?P<text>.*?)^[ \t]*```",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def grade_share(response: str, label: object) -> CodeGrade:
    """Share of the tests of `label` that the last Python block of the response passes.

    Raises ValueError if the label is not a test set; SandboxError if the sandbox does not work.
    """
    tests, program = read_tests(label), last_python_block(response)
    reasons = ["no_program" if program is None else run_test(program, test) for test in tests]
    return CodeGrade(reasons.count(None) / len(tests), dict(Counter(reason for reason in reasons if reason)))


def grade_all(response: str, label: object) -> CodeGrade:
    """1 where it passes all of them, else 0; the first test that fails ends it."""
    tests, program = read_tests(label), last_python_block(response)
    for test in tests:
        if reason := "no_program" if program is None else run_test(program, test):
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


def run_test(program: str, test: Test) -> str | None:
    """Run it; returns None if the program passes, else one of `registry.REASONS`.

    Raises SandboxError if the sandbox does not work any more, which is not because of this program.
    """
    try:
        match test:
            case InputTest():
                return _run_input(program, test)
            case CallTest():
                request = {"do": "call", "setup": _IMPORTS + test.setup, "program": program}
                return _run_asking(request | {"name": test.name, "arguments": test.arguments}, test)
            case ExpressionTest():
                request = {"do": "eval", "setup": test.setup, "program": program}
                return _run_asking(request | {"expression": test.expression}, test)
            case JudgedTest():
                return _run_judged(program, test)
    except SandboxError:
        probe()  # raises, unless it was this program that has ended its sandbox
        return "sandbox"


def _reason(result: SandboxResult) -> str | None:
    """Return the reason why the run itself failed; None if it ended with exit code 0."""
    match result.killed_by:
        case None:
            return None if result.ok else "error"
        case "wall time" | "CPU time":
            return "time"
        case "memory" | "disk":
            return "memory"
        case "SIGTERM to the sandbox":
            return "sandbox"
        case _:
            return "signal"


def _run_input(program: str, test: InputTest) -> str | None:
    result = Run(program, test.stdin, LIMITS).result()
    if reason := _reason(result):
        return reason
    if result.stdout_cut:
        return "output"
    return None if is_same_output(result.stdout, test.expected) else "wrong"


def is_same_output(output: str, expected: str) -> bool:
    """Line by line and word by word; numbers may be written otherwise ("1.0", "1.00")."""
    output_words = [line.split() for line in output.strip().splitlines()]
    expected_words = [line.split() for line in expected.strip().splitlines()]
    return len(output_words) == len(expected_words) and all(
        len(a) == len(b) and all(map(_is_same_word, a, b)) for a, b in zip(output_words, expected_words, strict=True)
    )


def _is_same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if "_" in a or "_" in b:  # Decimal reads 1_000 as Python does
        return False
    try:
        return Decimal(a) == Decimal(b)
    except InvalidOperation:  # no number, or a signalling NaN
        return False


def _run_asking(request: Mapping[str, object], test: CallTest | ExpressionTest) -> str | None:
    result = Run(_PROGRAM, json.dumps(request), LIMITS, ANSWER_BYTES).result()
    if reason := _reason(result):
        return reason
    if not result.answer:
        return "no_answer"
    try:
        return None if _is_expected(read_answer(result.answer), test) else "wrong"
    except NoPlainData:
        return "object"
    except Unreadable:
        return "output"


def _is_expected(answer: object, test: CallTest | ExpressionTest) -> bool:
    """Return whether the test holds. Raises Unreadable."""
    if isinstance(test, CallTest):
        value = canonical(answer, as_json=True)
        # APPS wraps some expected values in a list of one.
        return value == canonical(test.expected, as_json=True) or (
            isinstance(test.expected, list) and f"[{value}]" == canonical(test.expected, as_json=True)
        )
    match test.kind:
        case "==":
            return canonical(answer, as_json=False) == canonical(test.expected, as_json=False)
        case "is":
            return answer is test.expected
        case "true":
            return truth(answer)
        case _:
            return not truth(answer)


def _run_judged(program: str, test: JudgedTest) -> str | None:
    """The program serves its names to a judge, who runs the test; both in sandboxes, with two pipes between them."""
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(2):
            pipes.append(os.pipe())
    except OSError as error:
        for pipe in pipes:
            _close(pipe)
        raise SandboxError(f"no pipe between program and judge: {error}") from error
    questions, answers = pipes  # (read end, write end)
    serving = json.dumps({"do": "serve", "setup": test.program_setup, "program": program})
    judging = json.dumps(
        {"setup": test.setup, "statement": test.statement, "remote": test.remote, "modules": dict(test.modules)}
    )
    served = Run(_PROGRAM, serving, LIMITS, 1, (questions[0], answers[1]))
    judged = Run(_JUDGE, judging, LIMITS, 64, (questions[1], answers[0]))
    ends: dict[str, SandboxResult | SandboxError] = {}

    def start(name: str, run: Run, *descriptors: int) -> None:
        try:
            ends[name] = run.result(on_start=lambda: _close(descriptors))
        except SandboxError as error:
            ends[name] = error

    thread = threading.Thread(target=start, args=("program", served, questions[0], answers[1]))
    thread.start()
    start("judge", judged, questions[1], answers[0])
    # Without questions to wait for it ends by itself; one that does not is not waited for.
    thread.join(1.0)
    was_running = thread.is_alive()
    served.cancel()
    thread.join()
    judge, end = ends["judge"], ends["program"]
    if isinstance(judge, SandboxError):
        raise judge
    verdict = judge.answer.decode("ascii", "replace") if judge.ok else "error"
    if verdict == "passed":
        return None
    if verdict in ("wrong", "object", "error"):
        return _reason(judge) or verdict
    if isinstance(end, SandboxError):  # "ended": the program's process tells why
        if was_running:
            return "output"
        raise end
    return _reason(end) or "no_answer"


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


CODE = Reward(grade_share, read_tests, label="tests", is_slow_to_check=True, runs_programs=True)
CODE_ALL = Reward(grade_all, read_tests, label="tests", is_slow_to_check=True, runs_programs=True)
