"""The program that runs on a machine with GPUs: its stages, records and page. Its commands run here at tiny sizes."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from fusionrl import cli
from tests.clock import here_s
from tests.own_process import lives, wait_until
from tools import gpu_proof
from tools.proof import machine, repeats
from tools.proof.records import with_result
from tools.proof.stage import Failed, Result, Setting, Stage, missing, run_stage
from tools.proof.stages import STAGES, of_names, pages_rows

PAGE = gpu_proof.PAGE.read_text(encoding="utf-8")


def test_each_row_of_a_stage_is_on_the_page_once() -> None:
    rows = pages_rows(machine.ROOT)
    for begin in (row for stage in STAGES for row in stage.rows):
        assert len([row for row in rows if row.startswith(f"| {begin}")]) == 1, begin


def test_a_row_is_filled_in_and_can_be_again() -> None:
    row = "the loop colocated"
    passed = Result("loop-bf16", "passed", 61.7, {"log-probs differ by": 0.0123456, "transport": "ipc"})
    failed, skipped = Result("loop-bf16", "failed", why="a | b"), Result("loop-bf16", "skipped", why="needs 2 GPUs")
    once = with_result(PAGE, row, "2026-11-23, 1 x H100", passed)
    figures = "log-probs differ by 0.0123; transport ipc"
    assert re.search(rf"^\| {row}.*\| 2026-11-23, 1 x H100 \| passed in 62 s; {figures} \|$", once, re.MULTILINE)
    twice = with_result(once, row, "2026-11-24, 1 x H100", failed)
    assert "| 2026-11-24, 1 x H100 | failed: a / b |" in twice
    assert len(twice.splitlines()) == len(PAGE.splitlines())
    for page in (once, twice):
        assert with_result(page, row, "2026-11-25, a CPU", skipped) == page
    empty = with_result(PAGE, row, "2026-11-25, 1 x H100", skipped)
    assert "| 2026-11-25, 1 x H100 | skipped: needs 2 GPUs |" in empty
    assert "| 2026-11-23, 1 x H100 | passed in" in with_result(empty, row, "2026-11-23, 1 x H100", passed)
    with pytest.raises(ValueError, match="0 rows begin with"):
        with_result(PAGE, "no such row", "x", passed)


def test_two_runs_are_compared_without_times_and_readings_of_the_machine(tmp_path: Path) -> None:
    for name, watts, seconds, loss in (("one", 300.0, 0.5, 1.0), ("two", 310.0, 0.6, 2.0)):
        (tmp_path / name).mkdir()
        row = {"step": 1, "time": seconds, "hardware/power_w/trainers": watts, "perf/time_train_s": seconds}
        row |= {"train/loss": loss, "train/logprob_diff_mean": 0.25}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    figures = repeats.compare(tmp_path / "one", tmp_path / "two")
    assert figures["differ in the second run"] == 1 and figures["the first of these"] == "step 1 train/loss"
    assert figures["metrics"] == 2 and figures["log-probs of engine and trainer differ by"] == 0.25


def test_what_the_machine_lacks_is_said() -> None:
    stage = Stage("x", (), lambda setting: [], lambda *_: {}, num_gpus=2, packages=("no_such_package",))
    assert missing(stage, 8, machine.has_package, False) == "not installed: no_such_package"
    assert missing(stage, 1, lambda name: True, False) == "needs 2 GPUs, and this machine shows 1"
    assert missing(stage, 2, lambda name: True, False) is None
    assert missing(stage, 0, machine.has_package, True) is None
    named = Stage("x", (), lambda setting: [], lambda *_: {}, variables=("NO_SUCH_VARIABLE",))
    assert missing(named, 1, machine.has_package, False) == "not in the environment: NO_SUCH_VARIABLE"


def _stage(*code: str) -> Stage:
    def read(setting: Setting, status: int, output: str) -> dict[str, object]:
        if status:
            raise Failed("it failed")
        return {"said": output.strip()}

    return Stage("x", (), lambda setting: [sys.executable, "-c", *code], read)


def test_a_stage_of_its_own(tmp_path: Path) -> None:
    setting = Setting(tmp_path, tmp_path, True)
    found = run_stage(_stage("print('hello')"), setting, 30.0, os.environ)
    assert (found.status, found.figures) == ("passed", {"said": "hello"})
    found = run_stage(_stage("import sys; print('no memory'); sys.exit(3)"), setting, 30.0, os.environ)
    assert (found.status, found.why) == ("failed", "it failed (exit status 3; no memory)")
    # One that hangs is ended with what it has started.
    hangs = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        " print(p.pid, flush=True); time.sleep(600)"
    )
    start = time.monotonic()
    found = run_stage(_stage(hangs), setting, 2.0, os.environ)
    assert found.status == "failed" and "no end after 2 s" in found.why
    assert time.monotonic() - start < here_s(15)
    child = (tmp_path / "output.txt").read_text().split()[0]
    wait_until(lambda: not lives(child))


@pytest.mark.parametrize("name", ["geometry3k", "geometry3k-frozen"])
def test_a_published_model_that_sees_fits_on_the_gpu_of_its_stage(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen2.5-VL-3B, by the sizes of its config.json."""
    published = machine.ROOT / "tests/recipes/configs/qwen2.5-vl-7b.json"
    raw = json.loads(published.read_text()) | {"hidden_size": 2048, "intermediate_size": 11008, "vocab_size": 151936}
    raw |= {"num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}
    raw["vision_config"] |= {"out_hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    monkeypatch.setenv("FUSIONRL_PROOF_MODEL", str(tmp_path))
    monkeypatch.setenv("FUSIONRL_PROOF_DATA", "geometry3k.parquet")
    (stage,) = of_names(name)
    command = stage.command(Setting(tmp_path, tmp_path, False))
    flags = command[command.index("train") + 1 :]
    assert cli.main(["plan", "--cluster", "1x1xh100", *flags]) == 0
    assert "verdict    fits: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage that starts no engine; all of them: `tools/gpu_proof.py --rehearse`."""
    for num_before in (0, 1):
        assert gpu_proof.main(["--rehearse", "--out", str(tmp_path), "--only", "loss-fp32"]) == 0
        assert capsys.readouterr().out.count("has passed before") == num_before
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["status"]) for line in lines] == [("loss-fp32", "passed")]
    assert "a CPU (rehearsal) | passed in" in (tmp_path / "gpu-results.md").read_text()
    assert gpu_proof.PAGE.read_text(encoding="utf-8") == PAGE
