"""Room on the run's disks: a run is warned of it as the doctor does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fusionrl.checks.warnings import run_warnings
from fusionrl.cli.resolve import resolve

GIB = 2**30
FLAGS = ["--run-dir", "TMPDIR", "--save-hf"]


@pytest.mark.parametrize(
    ("free", "flag", "named"),
    [(1.0, "--no-save", ["--run-dir", "TMPDIR"]), (3.0, "--no-save", []), (1.0, "--save-hf=exports/model", FLAGS)],
)
def test_the_plan_warns_of_a_disk_with_little_room(
    free: float, flag: str, named: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100 * GIB, 99 * GIB, free * GIB))
    command = f"--mode sft --device cpu --hf-checkpoint {tiny_model} --num-rollout 1 --prompt-data {data} {flag}"
    command += f" --input-key messages --rollout-batch-size 1 --run-dir {tmp_path / 'run'}"
    texts = [text for text in run_warnings(*resolve(command.split())) if f"{free:.1f} GiB free" in text]
    assert sorted(text.split(" ")[0] for text in texts) == sorted(named)
