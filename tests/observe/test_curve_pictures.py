"""Curves: what is drawn for which keys, and that smoothing is the average it says it is."""

import math
from pathlib import Path

import numpy as np
import pytest

from fusionrl.observe import curves
from fusionrl.observe.curves import LOSS, MISMATCH, REWARD, draw_curves, series, smooth


def _run(steps: int) -> list[dict]:
    same = {MISMATCH: 1e-3, "perf/time_generate_s": 2.0, "perf/time_train_s": 1.0, "perf/tokens_per_s": 100.0}
    rows = [{"step": step, "attempt": 1, REWARD: step / steps, LOSS: 1 / (step + 1), **same} for step in range(steps)]
    for row in rows[::5]:
        row["eval/gsm8k/accuracy"] = 0.5
    return rows


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures in place of files, to be looked into."""
    figures: list = []
    monkeypatch.setattr(curves, "_save", lambda figure, out: figures.append(figure))
    return figures


def test_every_chart_of_an_rl_run_is_there(tmp_path: Path, drawn: list) -> None:
    draw_curves(_run(30), tmp_path / "curves.png", "a run")
    axes = {axis.get_title(loc="left"): axis for axis in drawn[0].axes}
    assert list(axes) == ["Reward", "Accuracy", "Loss", "Trainer against engine", "Time of a step", "Throughput"]
    assert axes["Trainer against engine"].get_yscale() == "log"
    assert all(axis.get_ylabel() and axis.get_xlabel() == "step" for axis in axes.values())
    legend = [text.get_text() for text in axes["Time of a step"].get_legend().get_texts()]
    assert legend == ["generate (67%)", "train (33%)"]
    (points,) = axes["Accuracy"].lines
    assert list(points.get_xdata()) == [0, 5, 10, 15, 20, 25]


@pytest.mark.parametrize("steps", [1, 61])
def test_any_length_is_drawn(tmp_path: Path, steps: int) -> None:
    out = draw_curves(_run(steps), tmp_path / "new" / "curves.png", "a run for $5")
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="finish a step"):
        draw_curves([{"step": 0, "attempt": 1, LOSS: None}], tmp_path / "a.png", "empty")


def test_nulls_are_gaps_and_are_reported_and_a_mismatch_of_zero_is_shown(tmp_path: Path, drawn: list) -> None:
    metrics = _run(20)
    metrics[3] |= {REWARD: None, "nonfinite": [REWARD]}
    metrics[4][MISMATCH] = 0.0
    draw_curves(metrics, tmp_path / "a.png", "run")
    assert 3 not in series(metrics, REWARD)[0] and len(series(metrics, REWARD)[0]) == 19
    assert any("1 step with NaN" in text.get_text() for text in drawn[0].texts)
    axis = next(axis for axis in drawn[0].axes if axis.get_title(loc="left").startswith("Trainer"))
    assert axis.get_yscale() == "symlog" and axis.get_ylim()[0] < 0


def test_smoothing_is_the_gaussian_average_over_steps() -> None:
    generator = np.random.default_rng(0)
    steps = sorted(generator.choice(200, size=80, replace=False).tolist())
    values = generator.normal(size=80).tolist()
    width = 0.03 * (steps[-1] - steps[0])
    for step, smoothed in zip(steps, smooth(steps, values), strict=True):
        weights = [math.exp(-0.5 * ((other - step) / width) ** 2) for other in steps]
        exact = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
        assert smoothed == pytest.approx(exact, abs=2e-3)
    assert smooth([0, 1, 5], [2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
