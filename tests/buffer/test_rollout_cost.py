"""What a rollout of long answers costs the Buffer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusionrl.engines.generation import parse_answer
from tests.buffer.answer_server import make_answer
from tests.buffer.rollout_cost import NUM_TOKENS, SIZES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timed
def test_samples_stay_arrays_and_are_parsed_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.buffer.answer_server", str(NUM_TOKENS)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        measure = [sys.executable, "-m", "tests.buffer.rollout_cost", url, str(tiny_model), str(tmp_path)]
        printed = subprocess.run(measure, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        server.stdin.close()
    small, large = (json.loads(line) for line in printed.splitlines())
    assert large["payload"] > SIZES[1] * NUM_TOKENS * 16
    # Arrays and text, and what is under way: 3 payloads. A field as a list of Python's numbers adds 2.
    assert large["grown"] < 3.8 * large["payload"], large
    body = make_answer(0, NUM_TOKENS)[2]
    start = time.process_time()
    for _ in range(SIZES[1] - SIZES[0]):
        parse_answer(body)
    parsing = time.process_time() - start
    # Their start costs the same in both.
    assert large["helpers_cpu_s"] - small["helpers_cpu_s"] > 0.4 * parsing, (small, large, parsing)
    # CPU seconds, not seconds: the machine may be busy. What grows with the square of the samples would be 16.
    assert large["cpu_s"] < 8 * small["cpu_s"], (small, large)
