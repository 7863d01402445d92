"""Threads of a push work on their rank's GPU."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

import fusionrl.weights
from fusionrl.weights.push_threads import in_thread, start_thread


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.device]:
    """Thread → the GPU that it has set; torch has no GPU here."""
    found: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.update({threading.get_ident(): device}))
    return found


def test_each_thread_sets_its_gpu_first(chosen: dict[int, torch.device]) -> None:
    device = torch.device("cuda", 3)
    seen: list[torch.device | None] = []

    def work(number: int) -> int:
        seen.append(chosen.get(threading.get_ident()))
        return number + 1

    start_thread(device, work, 1).join(10)
    assert in_thread(device, work, number=2).result(10) == 3
    assert seen == [device, device]
    chosen.clear()  # a number of a thread is given away again
    start_thread(torch.device("cpu"), work, 1).join(10)
    assert seen[2] is None


def test_a_failure_is_handed_over() -> None:
    def fail() -> None:
        raise SystemExit("the engine is gone")

    with pytest.raises(SystemExit, match="the engine is gone"):
        in_thread(torch.device("cpu"), fail).result(10)


def test_no_thread_is_started_in_another_way() -> None:
    """Of those that sent, none had a GPU: rank 1's waited for streams of rank 0's.

    Those of in_process.py stand for actors' processes; a trainer's is one thread, in which it sets its device.
    """
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(fusionrl.weights.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] == "Thread"
        and path.stem not in ("push_threads", "in_process")
    ]
    assert found == []
