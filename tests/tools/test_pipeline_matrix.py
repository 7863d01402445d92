"""tools/pipeline_matrix.py: which rows fail, the weights of each version, a model that can call a tool."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import pipeline_matrix
from tools.pipeline_matrix import HEADER, Outcome, Row, main, proves_nothing, read_metrics, shown, weights_of
from tools.rescoring import Rescored

ROW = Row("async-partial", "agent", "disk")
FULL = Rescored(samples=4, tokens=40, stale_tokens=5, spanning=1)


def outcome(rescored: Rescored, row: Row = ROW, **fields: object) -> Outcome:
    return Outcome(row, rescored, **{"tool_calls": 3, **fields})  # type: ignore[arg-type]


def test_a_run_in_which_nothing_happened_proves_nothing() -> None:
    assert proves_nothing(outcome(FULL)) == []
    (said,) = proves_nothing(outcome(Rescored(tokens=40, stale_tokens=5)))
    assert "no sample spans a push" in said and len(proves_nothing(outcome(Rescored()))) == 3
    assert proves_nothing(outcome(Rescored(tokens=40), Row("stream", "default", "disk"), tool_calls=0)) == []
    assert proves_nothing(outcome(FULL, tool_calls=0)) == ["no tool was called"]


@pytest.mark.parametrize(
    ("made", "flags", "code"),
    [
        (outcome(FULL), [], 0),
        (outcome(FULL, faults=["line 1: token 2 …"]), ["--allow-refused"], 1),
        (outcome(Rescored(), refused="error: --pipeline async: …"), [], 1),
        (outcome(Rescored(), refused="error: --pipeline async: …"), ["--allow-refused"], 0),
    ],
)
def test_the_exit_code(
    made: Outcome, flags: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "model").mkdir()
    rows = []
    monkeypatch.setattr(pipeline_matrix, "run_row", lambda row, options: rows.append(row) or made)
    flags += ["--out", str(tmp_path), "--pipelines", "on-policy,async", "--generation", "worker,batch"]
    assert main(flags) == code
    assert len(rows) == 3 * 2, "the worker goes with all but on-policy"
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(HEADER) + 1} and len(shown(made)) == len(HEADER)


def test_versions_and_metrics_of_a_run(tmp_path: Path) -> None:
    for name in ("weight_v000000", "weight_v000004", "weight_v000004.partial"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    found = weights_of(Row("stream", "default", "disk"), tmp_path, tmp_path / "model")
    assert found == {version: tmp_path / "weights" / f"weight_v00000{version}" for version in (0, 4)}
    steps = [{"step": 0, "sync/pause_s": 9.0}, {"step": 1, "sync/pause_s": 0.1, "pipeline/tokens_prefilled_again": 7.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.train.a1.jsonl").write_text('{"metadata": {"num_tool_calls": 2}}\n{}\n')
    made = outcome(FULL, tool_calls=0)
    read_metrics(tmp_path, made)
    assert (made.pauses, made.prefilled_again, made.tool_calls) == ([0.1], 7.0, 2)


def test_a_folder_that_is_used_again_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / ROW.name / "rollouts" / "step_000001.train.a1.jsonl"
    old.parent.mkdir(parents=True)
    old.write_text("{}\n")
    monkeypatch.setattr(pipeline_matrix.sys, "executable", "true")
    options = pipeline_matrix._parser().parse_args(["--out", str(tmp_path)])
    assert pipeline_matrix.launch(ROW, tmp_path / ROW.name, options, keeps_weights=True) == (0, "")
    assert not old.exists()
