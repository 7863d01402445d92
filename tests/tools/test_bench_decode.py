"""tools/bench/decode.py: the loop that engines are compared with, and what is printed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_qwen3
from tools.bench import decode


def test_the_loop_times_batches(tmp_path: Path) -> None:
    loop = decode.Loop(str(make_tiny_qwen3(tmp_path / "model")), "float32", 1)
    try:
        assert 0 < min(loop.seconds(2, 4, 3), loop.seconds(1, 1, 1)) < 60
    finally:
        loop.close()


def test_rates_and_ratios_are_of_the_same_turn(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [
        {"torch_batched": 1.0, "loop": 2.0},
        {"torch_batched": 30.0, "loop": 20.0},
        {"torch_batched": 2, "loop": 4},
    ]
    decode.report(argparse.Namespace(new_tokens=10), 4, turns)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["4", "torch_batched", "20.0", "0.500"],
        ["4", "loop", "10.0", "1.000"],
    ]
