"""tools/bench/load.py: a Buffer in a Ray actor under engines that keep a pace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.load import PHASES


@pytest.mark.slow
def test_a_load_is_measured(tmp_path: Path) -> None:
    flags = [
        "--in-flight",
        "64",
        "--rates",
        "1500",
        "--seconds",
        "1",
        "--tokens",
        "100",
        "--json",
        str(tmp_path / "f"),
    ]
    command = [sys.executable, "-m", "tools.bench.load", *flags]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / "f").read_text())
    assert figures["fill"]["in_flight"] == 64 and figures["fill"]["sent_s"] > 0
    (row,) = figures["rates"]
    assert 0 < row["samples_s"] < 3000 and row["in_flight"] <= 64
    assert row["cpu"].keys() == set(PHASES) - {"router"} and all(row["cpu"][name] > 0 for name in ("stream", "batches"))
    assert row["p50"] <= row["p99"] <= row["max"]
    assert figures["finished"]["finished"] > 0 and figures["finished"]["bytes_each"] > 0
    assert "| 1,500 |" in done.stdout
