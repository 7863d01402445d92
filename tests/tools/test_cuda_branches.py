"""Every branch that only a device `cuda` reaches has a test without one, or a stage of the proof that reaches it.

The table is tools/cuda_branches.txt. `python tools/cuda_branches.py --missing` prints the rows that it lacks, and
tools/cuda_reached.py finds the tests that reach a branch.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
from functools import cache
from pathlib import Path

import pytest

from fusionrl.plan.defaults import trainer_precision
from tools.cuda_branches import ROOT, Branch, read_table, scan
from tools.cuda_reached import Watch
from tools.proof.stages import STAGES

TABLE = read_table()


@pytest.fixture(scope="module")
def branches() -> list[Branch]:
    """Those of the whole package: seconds, which no worker is to spend as it collects."""
    return scan()


def test_none_is_without_a_test_or_a_stage(branches: list[Branch]) -> None:
    names = {str(branch) for branch in branches}
    missing = [name for name in names if not TABLE.get(name)]
    assert missing == [], "only a GPU reaches these: say in tools/cuda_branches.txt what shows that they work"
    assert sorted(TABLE.keys() - names) == [], "these are gone, or need no GPU any more"


@cache
def _functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("place", sorted({place for places in TABLE.values() for place in places}))
def test_what_reaches_them_is_there(place: str) -> None:
    if place.startswith("stage "):
        assert place.removeprefix("stage ") in {stage.name for stage in STAGES}
    else:
        file, _, name = place.partition("::")
        assert name.split("::")[-1] in _functions(file)


def test_each_of_the_twelve_defects_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "results" / "without-a-gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, 13))
    stages = {stage.name for stage in STAGES}
    for number, tests, places in rows:
        found = 0
        for part in tests.split(";"):
            file, *names = (name for name in re.findall(r"`([^`]+)`", part) if name.startswith(("tests/", "test_")))
            assert set(names) <= _functions(file), f"{number}: {names} in {file}"
            found += len(names)
        assert found, number
        assert set(re.findall(r"`([^`]+)`", places)) <= stages, number


SOURCE = """
import torch

class Plan:
    @property
    def takes_turns(self) -> bool:
        return self.device == "cuda" and self.colocate

def early(device):
    if device == "cpu":
        return 0
    if device.index > 3:
        return 1
    return only_here()

def only_here():
    return 2

def arms(plan, tensor, names):
    value = "nccl" if plan.device == "cuda" else "gloo"
    if plan.takes_turns:
        value += "x"
    elif names:
        value += "y"
    both = names and plan.device != "cpu"
    kept = [name for name in names if tensor.is_cuda]
    if names or plan.takes_turns:
        torch.cuda.synchronize()
    return value, both, kept
"""


def test_arms_that_a_cpu_never_takes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    assert [f"{branch.function} | {branch.arm}" for branch in scan(tmp_path)] == [
        "Plan.takes_turns | and after self.device == 'cuda'",
        "early | rest after device == 'cpu'",
        "early | if device.index > 3",
        "only_here | def",
        "arms | if plan.device == 'cuda'",
        "arms | if plan.takes_turns",
        "arms | filter tensor.is_cuda",
        "arms | or by plan.takes_turns of names or plan.takes_turns",
        "arms | call of torch.cuda.synchronize",
    ]


def test_a_test_that_reaches_a_branch_is_seen(branches: list[Branch]) -> None:
    watch, before = Watch(branches), (sys.gettrace(), threading.gettrace())
    name = "plan/defaults.py:trainer_precision | if device == 'cuda'"
    assert name in {str(branch) for branch in branches}
    try:
        for test, device in (("a", "cpu"), ("b", "cuda"), ("c", "cuda")):
            watch.test = test
            sys.settrace(watch.call)
            assert trainer_precision("auto", device) == ("bf16" if device == "cuda" else "fp32")  # type: ignore[arg-type]
    finally:
        sys.settrace(before[0])
    assert watch.reached == {name: ["b", "c"]}
