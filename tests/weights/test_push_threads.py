"""Threads of a push work on their rank's GPU."""

import ast
import sys
import threading
from pathlib import Path

import pytest
import torch

import fusionrl.weights
from fusionrl.weights.broadcast import in_thread, start_thread


def test_each_thread_sets_its_gpu_first_and_hands_its_failure_over(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, torch.device] = {}  # thread → the GPU that it has set; torch has no GPU here
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.update({threading.get_ident(): device}))
    device, cpu = torch.device("cuda", 3), torch.device("cpu")
    seen: list[torch.device | None] = []

    def work(number: int) -> int:
        seen.append(chosen.get(threading.get_ident()))
        return number + 1

    start_thread(device, work, 1).join(10)
    assert in_thread(device, work, number=2).result(10) == 3
    assert seen == [device, device]
    chosen.clear()  # a number of a thread is given away again
    start_thread(cpu, work, 1).join(10)
    assert seen[2] is None
    with pytest.raises(SystemExit, match="the engine is gone"):
        in_thread(cpu, sys.exit, "the engine is gone").result(10)


def test_no_thread_is_started_in_another_way() -> None:
    """Of those that sent, none had a GPU: rank 1's waited for streams of rank 0's.

    Those of remote_calls.py replace actors' processes; a trainer's is one thread, in which it sets its device.
    """
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(fusionrl.weights.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] == "Thread"
        and path.stem not in ("broadcast", "remote_calls")
    ]
    assert found == []
