"""A plug-in of pytest that finds out which tests reach the branches that `tools/cuda_branches.py` lists.

    python -m pytest -p tools.cuda_reached --cuda-reached FILE tests/weights tests/trainer …

FILE gets the rows of the table: each branch that was reached, and the first tests that did. Only this process is
watched, its threads included; no child is. Instructions are followed, in the functions with a branch alone, so that an
arm of a conditional expression counts as one of an `if` does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from tools.cuda_branches import ROOT, Branch, scan

if TYPE_CHECKING:
    import pytest

TESTS_A_BRANCH = 3
Trace = Callable[[FrameType, str, object], object]


class Watch:
    """Which branches were reached while `test` was named."""

    def __init__(self, branches: list[Branch]) -> None:
        self.test = ""
        self.reached: dict[str, list[str]] = {}
        self._branches: dict[str, list[Branch]] = {}
        for branch in branches:
            if branch.arm.startswith(("and by", "or by")):  # a CPU evaluates it, too
                continue
            self._branches.setdefault(str(ROOT / "fusionrl" / branch.file), []).append(branch)
        self._steps: dict[CodeType, dict[int, list[Branch]]] = {}

    def call(self, frame: FrameType, event: str, argument: object) -> Trace | None:
        """Follow this frame if its code has a branch that is still looked for."""
        code = frame.f_code
        if code.co_filename not in self._branches:
            return None
        if code not in self._steps:
            self._steps[code] = dict(self._steps_of(code))
        if not self._steps[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._follow

    def _follow(self, frame: FrameType, event: str, argument: object) -> Trace:
        if event == "opcode":
            for branch in self._steps[frame.f_code].get(frame.f_lasti, ()):
                tests = self.reached.setdefault(str(branch), [])
                if self.test and self.test not in tests and len(tests) < TESTS_A_BRANCH:
                    tests.append(self.test)
        return self._follow

    def _steps_of(self, code: CodeType) -> Iterator[tuple[int, list[Branch]]]:
        """Offsets of instructions, with the branches that they are part of."""
        branches = self._branches[code.co_filename]
        for index, (line, _, column, _) in enumerate(code.co_positions()):
            if line is None or column is None or line == code.co_firstlineno == 0:
                continue
            reached = [branch for branch in branches if branch.span[:2] <= (line, column) < branch.span[2:]]
            if reached:
                yield 2 * index, reached


WATCH: Watch | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --cuda-reached."""
    parser.addoption("--cuda-reached", type=Path, help="file for the branches that were reached")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch."""
    global WATCH
    if config.getoption("--cuda-reached"):
        WATCH = Watch(scan())


def pytest_runtest_logstart(nodeid: str) -> None:
    """Name the test that runs."""
    if WATCH is not None:
        WATCH.test = nodeid.split("[")[0]
        sys.settrace(WATCH.call)
        threading.settrace(WATCH.call)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was found."""
    path: Path | None = session.config.getoption("--cuda-reached")
    if WATCH is None or path is None:
        return
    sys.settrace(None)
    order = [str(branch) for branch in scan() if str(branch) in WATCH.reached]
    rows = ["\n".join([name, *(f"    {test}" for test in WATCH.reached[name])]) for name in order]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
