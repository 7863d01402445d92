"""Room on the run's disks: the plan and the start of a run warn as the doctor does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fusionrl import cli

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "flags", "named"),
    [
        (1.0 * GIB, ["--no-save"], ["--run-dir", "TMPDIR"]),
        (3.0 * GIB, ["--no-save"], []),
        (1.0 * GIB, ["--save-hf", "exports/model"], ["--run-dir", "TMPDIR", "--save-hf"]),
    ],
)
def test_the_plan_warns_of_a_disk_with_little_room(
    free: float,
    flags: list[str],
    named: list[str],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100 * GIB, 99 * GIB, free))
    command = ["plan", "--mode", "sft", "--device", "cpu", "--hf-checkpoint", str(tiny_model), "--num-rollout", "1"]
    command += ["--prompt-data", str(data), "--input-key", "messages", "--rollout-batch-size", "1"]
    assert cli.main([*command, "--run-dir", str(tmp_path / "run"), *flags]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for flag in ("--run-dir", "TMPDIR", "--save-hf"):
        assert (f"{free / GIB:.1f} GiB free" in out.partition(f"{flag} ")[2][:200]) == (flag in named), out
