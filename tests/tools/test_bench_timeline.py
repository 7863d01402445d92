"""The price of the timeline's record: counted from a run, and small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.timeline_runs import make_run
from tools.bench.timeline import price_of_run


def test_the_price_of_a_run_is_that_of_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    share = price_of_run(make_run(tmp_path / "run"))
    out = capsys.readouterr().out
    assert "buffer                 46 records" in out
    assert 0 < share < 0.01
