"""tools/bench/pipelines.py: a pipeline over paced engines, the slow tool, and the table that goes on."""

from pathlib import Path

import pytest

from tools.bench import pipelines, pipelines_tool
from tools.bench.lengths import Lengths
from tools.bench.pipelines_paced import Row, Setting, run_row
from tools.bench.pipelines_virtual import run_virtual

LINE = {"samples_per_s": 4.0, "step_s": 2.0, "wait_s": 1.0, "drain_s": 0.0, "train_s": 0.5, "push_s": 0.1}
LINE |= {"staleness": 0.0, "staleness_max": 0.0}


@pytest.mark.engine
def test_a_pipeline_over_paced_engines(tiny_model: Path) -> None:
    """Real router, Buffer and controller: the steps take what the model says, and the bound holds."""
    setting = Setting(
        engines=4, prompts=8, samples=4, weight=1.0, update_s=2.0, push_s=2.0, time_scale=0.1,
        lengths=Lengths(median=500.0, sigma=1.0, longest=4_000),
    )  # fmt: skip
    row = Row("async-partial", "async-partial", {"admission_lead": 1.0}, parts=2)
    found = run_row(setting, row, 2, 2, tiny_model)
    assert len(found["steps"]) == 2 and 0 < found["staleness_max"] <= 2
    mean = 32 * setting.lengths.mean()
    assert all(step["train_s"] >= 1.99 * step["tokens"] / mean for step in found["steps"])
    assert all(step["push_s"] >= 2 for step in found["steps"])
    assert found["step_s"] >= found["train_s"] + found["push_s"]
    assert 0 < found["engines_idle"] < 1 and 0 < found["trainers_idle"] < 1
    assert found["tokens_prefilled_again"] > 0 and found["loop_delay_s"] > 0
    assert found["buffer_cpu_s_per_1000"] > 0 and found["router_cpu_s_per_1000"] > 0


def test_in_virtual_time_overlap_hides_generation() -> None:
    """verl's 64:64 setting, an eighth of its size: what is generated ahead need not be waited for."""
    setting = Setting(engines=2, gpus=4, prompts=64, weight=1.0)
    row = Row("on-policy", "on-policy", log_probs=True)
    ahead = Row("partial", "async-partial", {"admission_lead": 1.5})
    runs = [run_virtual(setting, one, 4, 3) for one in (row, ahead)]
    base, partial = pipelines.summary(runs)
    assert partial["speed_up"] > 2.5 and partial["trainers_idle"] < 0.15 < base["trainers_idle"]
    assert partial["tokens_prefilled_again"] > 0 == base["tokens_prefilled_again"]
    assert 1.8 < partial["speed_up_without"] < partial["speed_up"]


def test_speed_up_with_and_without_log_probs() -> None:
    base = {"name": "on-policy", "step_s": 300.0, "log_probs_s": 60.0, "loop_delay_s": 0.0}
    base |= {"buffer_cpu_s_per_1000": 1.0, "router_cpu_s_per_1000": 0.5}
    turns = [base, {**base, "name": "async", "step_s": 90.0, "log_probs_s": 0.0, "loop_delay_s": 0.2}]
    turns += [{**turns[1], "step_s": 110.0, "loop_delay_s": 0.1}]
    _, row = pipelines.summary(turns)
    assert row["step_s"] == 100 and row["speed_up"] == 3 and row["speed_up_without"] == pytest.approx(2.4)
    assert row["loop_delay_s"] == 0.2 and row["turns"] == 2
    assert "| async | 100.0 | 3.00 | 2.40 |" in pipelines.table([row])


def test_figures_of_a_run() -> None:
    """The first steps are not timed, nor are those after an evaluation, which counts at the time of its step."""
    task = pipelines_tool.Task(prompts=2, samples=4, warm_up=2)
    metrics: list[dict[str, float]] = [{"perf/step_time_s": one} for one in (9.0, 9.0, 2.0, 2.0, 0.1, 0.1, 2.0)]
    metrics[3]["eval/held-out/accuracy"] = 0.5
    metrics[6] |= {"eval/held-out/accuracy": 0.9, "rollout/staleness/token_max": 2.0}
    found = pipelines_tool.figures(metrics, task)
    assert (found["step_s"], found["samples_per_s"], found["steps"]) == (2.0, 4.0, 7)
    assert found["curve"] == [[22.0, 0.5], [pytest.approx(24.2), 0.9]]
    assert found["accuracy"] == 0.9 and found["staleness_max"] == 2
    assert pipelines_tool.time_to(found["curve"], 0.8) == pytest.approx(24.2)
    assert pipelines_tool.time_to(found["curve"], 0.95) is None
