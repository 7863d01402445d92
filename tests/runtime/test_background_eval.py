"""Evaluations on engines of their own: one at a time, beside training, none is dropped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fusionrl.runtime.buffer_handle import EvaluationLost
from fusionrl.runtime.loops import on_policy, streamed
from fusionrl.runtime.supervisor import StopSignal, Terminated
from tests.runtime.run_fakes import Cluster, run_of

OWN: dict[str, Any] = {"eval_num_gpus": 1, "eval_interval": 2, "eval_prompt_data": ["x", "x.jsonl"]}


def steps_between(log: list[str], first: str, last: str) -> list[str]:
    return [line for line in log[log.index(first) : log.index(last)] if line.startswith("train")]


def test_training_goes_on_while_one_is_under_way() -> None:
    cluster = Cluster()
    run, diary = run_of(cluster, StopSignal(), 5, **OWN)
    on_policy(run)
    log = diary.log
    assert [line for line in log if line.startswith("push")] == [
        *("push 0 to all", "push 1", "push 2 to all", "push 3", "push 4 to all", "push 5 to all")
    ]
    # The one of step 2 ends when its engines are needed for step 4, and that one before the push of the last step.
    assert steps_between(log, "begin evaluation 2", "evaluate 2") == ["train 2", "train 3"]
    assert log.index("evaluate 2") < log.index("push 4 to all") < log.index("begin evaluation 4")
    assert log.index("evaluate 4") < log.index("push 5 to all") < log.index("begin evaluation 5")
    assert log[-2:] == ["evaluate 5", "record evaluation 5"], "the run waits for the last one"
    assert "perf/time_wait_eval_s" in diary.rows[4] and "perf/time_wait_eval_s" not in diary.rows[3]
    assert all("eval/x/accuracy" in diary.rows[step] for step in (2, 4, 5))


def test_a_stream_waits_for_the_one_before_and_ends_with_the_last() -> None:
    cluster = Cluster()
    cluster.stream(interval=2)
    run, diary = run_of(cluster, StopSignal(), 5, **OWN, pipeline="stream")
    evaluate = cluster.buffer.wait_evaluation
    cluster.buffer.wait_evaluation = lambda step: (time.sleep(0.02), evaluate(step))[1]
    streamed(run)
    log = diary.log
    pushes = [line for line in log if line.startswith("push")]
    assert pushes == ["push 0 to all", "push 2 to all", "push 4 to all", "push 5 to all"]
    assert log.index("train 3") < log.index("evaluate 2") < log.index("push 4 to all")
    assert diary.rows[4]["perf/time_wait_eval_s"] >= 0.02 and diary.rows[5]["perf/time_wait_eval_s"] >= 0.02
    assert log[-3:] == ["evaluate 5", "record evaluation 5", "stop"], "the stop is for every function at work"


def test_the_one_before_the_first_step_is_beside_it_too() -> None:
    run, diary = run_of(Cluster(), StopSignal(), 1, **OWN | {"skip_eval_before_train": False})
    on_policy(run)
    assert diary.log[:4] == ["push 0 to all", "begin evaluation 0", "record 0", "generate 0"]
    assert diary.log.index("record evaluation 0") < diary.log.index("push 1 to all")


def test_one_that_has_ended_is_recorded_after_the_next_step() -> None:
    cluster = Cluster()
    cluster.done = {2}
    run, diary = run_of(cluster, StopSignal(), 5, **OWN)
    on_policy(run)
    at = diary.log.index("record evaluation 2")
    assert diary.log.index("record 2") < at < diary.log.index("generate 2")


def test_a_stop_while_the_next_waits_saves_the_step() -> None:
    with StopSignal() as stop:
        cluster = Cluster("evaluate 2")
        run, diary = run_of(cluster, stop, 5, **OWN)
        with pytest.raises(Terminated):
            on_policy(run)
    assert diary.log[-3:] == ["evaluate 2", "record 4", "save 3"]
    run.end_early()
    assert diary.lines == ["the evaluation after step 2 has not ended; it has no result"]


def test_one_that_has_ended_at_a_stop_is_recorded() -> None:
    with StopSignal() as stop:
        cluster = Cluster("train 2")
        run, diary = run_of(cluster, stop, 5, **OWN)
        with pytest.raises(Terminated):
            on_policy(run)
        cluster.done = {2}
        run.end_early()
    assert diary.log[-3:] == ["save 2", "evaluate 2", "record evaluation 2"]
    assert diary.lines == [] and run.background_eval.step is None


def losing(cluster: Cluster, *counts: tuple[int, int]) -> None:
    """Let the engines die: of the evaluation after a step, so many times."""
    left, evaluate = dict(counts), cluster.buffer.wait_evaluation

    def wait(step: int) -> dict[str, float]:
        found = evaluate(step)
        if left.get(step):
            left[step] -= 1
            raise EvaluationLost(1, RuntimeError("no engine answers"))
        return dict(found)

    cluster.buffer.wait_evaluation = wait


@pytest.mark.parametrize("pipeline", ["on-policy", "async"])
def test_one_whose_engines_died_has_failed_and_the_run_goes_on(pipeline: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has its weights any more."""
    cluster = Cluster()
    cluster.stream(interval=1)
    losing(cluster, (2, 1))
    run, diary = run_of(cluster, StopSignal(), 5, **OWN, pipeline=pipeline)
    (on_policy if pipeline == "on-policy" else streamed)(run)
    assert diary.rows[2]["eval/failed"] == diary.rows[2]["eval/engines_died"] == 1
    assert "eval/x/accuracy" not in diary.rows[2]
    assert "the evaluation after step 2 failed; the run continues: 1 of its engines died: no engine" in caplog.text
    assert diary.log.count("begin evaluation 2") == 1 and diary.log.count("push 2 to all") == 1
    assert all("eval/x/accuracy" in diary.rows[step] for step in (4, 5))


@pytest.mark.parametrize("num_lost", [1, 9])
def test_the_last_one_is_made_again_a_few_times_as_its_weights_are_still_there(num_lost: int) -> None:
    cluster = Cluster()
    losing(cluster, (5, num_lost))
    run, diary = run_of(cluster, StopSignal(), 5, **OWN)
    on_policy(run)
    again = ["evaluate 5", "push 5 to all", "begin evaluation 5", "evaluate 5", "record evaluation 5"]
    assert diary.log[-5:] == again and diary.log.count("begin evaluation 5") == min(3, 1 + num_lost)
    assert ("eval/failed" in diary.rows[5]) == (num_lost > 1) != ("eval/x/accuracy" in diary.rows[5])


def row(step: int, attempt: int = 1, is_due: bool = False) -> dict[str, float]:
    """Of a trained step in metrics.jsonl."""
    due = {"perf/time_wait_eval_s": 0.0} if is_due else {}
    return {"step": step, "attempt": attempt, "perf/step_time_s": 1.0, **due}


DUE_4 = [row(1), row(2, is_due=True), row(3), row(4, is_due=True)]


@pytest.mark.parametrize(
    ("first", "files", "rows", "begins", "warns"),
    [
        (4, {2: 1}, DUE_4, [4], False),  # the one of the checkpoint's own step is made again
        (2, {}, DUE_4[:2], [2], False),  # also the first one, before which there is no folder of results
        (4, {2: 1, 4: 1}, [*DUE_4, row(4, 2, True)], [4], False),  # the result is of weights that were discarded
        (4, {2: 1, 4: 2}, [*DUE_4, {"step": 4, "attempt": 2, "sync/version": 4.0}], [], False),  # made by a resume
        (5, {2: 1}, [*DUE_4, row(5)], [], True),  # the weights of step 4 are gone
        (5, {2: 1, 4: 1}, [*DUE_4, row(5)], [], False),
        (5, {2: 1, 4: 1}, [*DUE_4, row(4, 2, True), row(5, 2)], [], True),
        (5, {3: 1}, [row(3, is_due=True), row(4), row(5)], [], False),  # --eval-interval was 3 before
        (5, {2: 1, 4: 1}, [*DUE_4, row(5, is_due=True)], [5], False),  # it was the last step, --num-rollout is higher
    ],
)
def test_what_a_resume_owes(
    first: int,
    files: dict[int, int],
    rows: list[dict[str, float]],
    begins: list[int],
    warns: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, diary = run_of(Cluster(), StopSignal(), 7, **OWN)
    run.first_rollout, run.path = first, tmp_path
    for step, attempt in files.items():
        (tmp_path / "eval").mkdir(exist_ok=True)
        (tmp_path / "eval" / f"{step}.json").write_text(json.dumps({"step": step, "attempt": attempt}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    monkeypatch.setattr(run.stop, "check", lambda: (_ for _ in ()).throw(Terminated("enough")))
    with pytest.raises(Terminated):
        on_policy(run)
    assert [line for line in diary.log if line.startswith("begin")] == [f"begin evaluation {step}" for step in begins]
    assert ("the evaluation after step 4 had not ended" in caplog.text) == warns
