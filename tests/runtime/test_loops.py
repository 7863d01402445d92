"""A step's end: what is recorded and saved when a stop request comes in the middle of it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from fusionrl.buffer.evaluation import MixedVersions
from fusionrl.config.config import Config
from fusionrl.config.user_code import HookError
from fusionrl.observe import spans
from fusionrl.observe.timeline.records import read_attempt
from fusionrl.runtime import loops
from fusionrl.runtime.buffer_calls import PendingCall
from fusionrl.runtime.buffer_handle import BufferHandle, EvaluationLost
from fusionrl.runtime.loops import idle_shares, on_policy, streamed
from fusionrl.runtime.run import _draw
from fusionrl.runtime.supervisor import StopSignal, Terminated
from tests.runtime.run_fakes import Cluster, run_of


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as signal_:
        yield signal_


@pytest.mark.parametrize(
    ("stops", "rest"),
    [
        ("train 1", []),  # no push for engines that end now
        ("push 2", ["push 2", "evaluate 2"]),
        ("evaluate 2", ["push 2", "evaluate 2"]),
    ],
)
def test_a_stop_after_training_loses_no_row_and_no_checkpoint(stop: StopSignal, stops: str, rest: list[str]) -> None:
    """The rollout counts as trained, so a resume begins after it: its row has to be there."""
    run, diary = run_of(Cluster(stops), stop)
    with pytest.raises(Terminated):
        on_policy(run)
    assert diary.log[diary.log.index("train 1") :] == ["train 1", *rest, "record 2", "save 1"]
    assert run.last_trained == 1 and diary.rows[2]["train/loss"] == 1.0


def test_an_error_records_nothing(stop: StopSignal) -> None:
    cluster = Cluster()
    run, diary = run_of(cluster, stop)

    cluster.trainers.train = Mock(side_effect=RuntimeError("trainer rank 1 died"))
    with pytest.raises(RuntimeError, match="rank 1"):
        on_policy(run)
    assert diary.log == ["push 0", "record 0", "generate 0"] and run.last_trained == -1


def test_the_time_of_training_is_that_of_its_phase(stop: StopSignal, tmp_path: Path) -> None:
    """Without the wait for rows of samples that a slow disk has not written yet: that has a phase of its own."""
    run, diary = run_of(Cluster(), stop, 1)
    run.actors.buffer.add_trained = lambda *_: time.sleep(0.2)
    spans.record_to(tmp_path, "driver", 1)
    try:
        on_policy(run)
    finally:
        spans.stop_recording()
    train, columns, record = (
        read_attempt(tmp_path, 1).of("driver", name)[0] for name in ("train", "columns", "record")
    )
    assert diary.rows[1]["perf/time_train_s"] * 1e6 <= train.duration + 2
    assert train.end <= columns.start and columns.duration >= 0.19e6 and columns.end <= record.start
    assert [one.facts["step"] for one in (train, columns, record)] == [1, 1, 1]


def test_the_idle_share_of_a_step() -> None:
    times = {"perf/step_time_s": 10.0, "perf/time_train_s": 3.0, "perf/time_sync_s": 1.0, "perf/time_generate_s": 6.0}
    assert idle_shares(times, True) == pytest.approx({"perf/trainers_idle": 0.6, "perf/engines_idle": 0.4})
    assert idle_shares(times | {"perf/engines_idle": 0.1}, True) == pytest.approx({"perf/trainers_idle": 0.6})
    assert idle_shares(times, False).keys() == {"perf/trainers_idle"}, "a run without engines"


def test_a_run_without_anything_to_draw_has_not_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As an evaluation whose metrics a user's function logs."""
    caplog.set_level("INFO")
    _draw([{"step": 0, "eval/weight_version": 0}], tmp_path / "curves.png", "alone")
    assert "no curves: nothing to draw" in caplog.text and not list(tmp_path.iterdir())


# --------------------------------------------------------------------- which loop runs a configuration
@pytest.mark.parametrize(
    ("flags", "loop"),
    [
        ({}, loops.on_policy),
        ({"pipeline": "async"}, loops.streamed),
        ({"mode": "sft"}, loops.sft),
        ({"mode": "reject-sampling"}, loops.reject_sampling),
        ({"mode": "eval"}, loops.evaluate_only),
        ({"debug_train_only": True}, loops.train_only),
        ({"mode": "sft", "debug_train_only": True}, loops.sft),
        ({"debug_rollout_only": True}, loops.rollout_only),
    ],
)
def test_the_loop_of_a_mode(flags: dict[str, Any], loop: loops.Loop) -> None:
    assert loops.choose_loop(Config.from_flat(flags)) is loop


@pytest.mark.parametrize(
    ("loop", "flags", "log"),
    [
        (loops.on_policy, {}, "push 0, record 0, generate 0, train 0, push 1, evaluate 1, record 1, save 0"),
        (loops.sft, {"mode": "sft"}, "generate 0, train 0, record 1, save 0, generate 1, train 1"),
        (loops.reject_sampling, {"mode": "reject-sampling"}, "push 0, generate 0, record 1, save 0"),
        (loops.rollout_only, {"debug_rollout_only": True}, "generate 0, record 1, generate 1, record 2"),
        (loops.train_only, {"debug_train_only": True}, "generate 0, train 0, record 1, save 0"),
        (loops.evaluate_only, {"mode": "eval"}, "evaluate 0, record 0"),
    ],
)
def test_the_order_of_things(loop: loops.Loop, flags: dict[str, Any], log: str) -> None:
    run, diary = run_of(Cluster(), StopSignal(), **flags)
    loop(run)
    assert ", ".join(diary.log).startswith(log)
    if loop is loops.on_policy:
        assert {"perf/step_time_s", "perf/tokens_per_s", "perf/time_train_s", "eval/x/reward"} <= set(diary.rows[1])
    if loop is loops.sft:
        assert {"perf/step_time_s", "perf/tokens_per_s", "eval/x/loss"} <= set(diary.rows[1])
    if loop is loops.reject_sampling:  # weights are pushed once, and the first row says so
        assert "sync/version" in diary.rows[1] and "sync/version" not in diary.rows[2]
        assert diary.lines[-1] == "accepted 4 of 6 samples: accepted.jsonl"


# ---------------- evaluations on engines of their own: one at a time, beside training, none is dropped
OWN: dict[str, Any] = {"eval_num_gpus": 1, "eval_interval": 2, "eval_prompt_data": ["x", "x.jsonl"]}


def lines_of(log: list[str], *words: str) -> list[str]:
    return [line for line in log if line.startswith(words)]


def test_training_goes_on_while_one_is_under_way() -> None:
    """The one of step 2 ends when its engines are needed for step 4, and that one before the push of the last step."""
    run, diary = run_of(Cluster(), StopSignal(), 5, **OWN)
    on_policy(run)
    assert lines_of(diary.log, "push", "begin", "evaluate", "train") == [
        *("push 0", "train 0", "push 1", "train 1", "push 2 to all", "begin evaluation 2"),
        *("train 2", "push 3", "train 3", "evaluate 2", "push 4 to all", "begin evaluation 4"),
        *("train 4", "evaluate 4", "push 5 to all", "begin evaluation 5", "evaluate 5"),
    ]
    assert diary.log[-1] == "record evaluation 5", "the run waits for the last one"
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
    assert lines_of(log, "push") == ["push 0", "push 2 to all", "push 4 to all", "push 5 to all"]
    assert log.index("train 3") < log.index("evaluate 2") < log.index("push 4 to all")
    assert diary.rows[4]["perf/time_wait_eval_s"] >= 0.02 and diary.rows[5]["perf/time_wait_eval_s"] >= 0.02
    assert log[-3:] == ["evaluate 5", "record evaluation 5", "stop"], "the stop is for every function at work"


def test_the_one_before_the_first_step_is_beside_it_too() -> None:
    run, diary = run_of(Cluster(), StopSignal(), 1, **OWN | {"skip_eval_before_train": False})
    on_policy(run)
    assert diary.log[:4] == ["push 0", "begin evaluation 0", "record 0", "generate 0"]
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
    assert diary.lines == [] and run.background_eval is not None and run.background_eval.step is None


def losing(cluster: Cluster, lost_step: int, num_times: int) -> None:
    """Let the engines of the evaluation after a step die, so many times."""
    losses, evaluate = iter(range(num_times)), cluster.buffer.wait_evaluation

    def wait(step: int) -> dict[str, float]:
        metrics = evaluate(step)
        if step == lost_step and next(losses, None) is not None:
            raise EvaluationLost(1, RuntimeError("no engine answers"))
        return dict(metrics)

    cluster.buffer.wait_evaluation = wait


@pytest.mark.parametrize("pipeline", ["on-policy", "async"])
def test_one_whose_engines_died_has_failed_and_the_run_goes_on(pipeline: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has its weights any more."""
    cluster = Cluster()
    cluster.stream(interval=1)
    losing(cluster, 2, 1)
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
    losing(cluster, 5, num_lost)
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
def test_what_a_resume_owes(first, files, rows, begins, warns, tmp_path, caplog) -> None:
    run, diary = run_of(Cluster(), StopSignal(), 7, **OWN)
    run.first_rollout, run.path = first, tmp_path
    for step, attempt in files.items():
        (tmp_path / "eval").mkdir(exist_ok=True)
        (tmp_path / "eval" / f"{step}.json").write_text(json.dumps({"step": step, "attempt": attempt}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    run.stop.check = Mock(side_effect=Terminated("enough"))  # type: ignore[method-assign]
    with pytest.raises(Terminated):
        on_policy(run)
    assert lines_of(diary.log, "begin") == [f"begin evaluation {step}" for step in begins]
    assert ("the evaluation after step 4 had not ended" in caplog.text) == warns


# ---------------------------------------------------------------------- the driver's end of the Buffer
def waited(engines: list[str], num_died: int = 0, error: Exception | None = None) -> tuple[list[str], dict[str, float]]:
    """Wait for an evaluation on these engines, of which some die; calls in order, and metrics."""
    pool, supervisor = Mock(router=None), Mock()
    pool.evaluation.configure_mock(engines=engines, router=None)
    pool.evaluation.count_faults.return_value = pool.count_faults.return_value = {"engines_died": 4.0 + num_died}
    wrapped = error and ray.exceptions.RayTaskError("evaluate", "traceback", error)
    supervisor.wait.configure_mock(return_value={"eval/x/reward": 1.0}, side_effect=wrapped)
    calls = Mock()
    calls.attach_mock(pool.begin_round, "begin_round")
    calls.attach_mock(supervisor.wait, "wait")
    started: Any = PendingCall(None, None, Mock(), {"engines_died": 4.0})  # type: ignore[arg-type]
    metrics = BufferHandle(pool, supervisor, Mock(), None).wait_evaluation(started)
    return [name for name, *_ in calls.mock_calls], metrics


def test_an_old_health_check_is_not_read_while_others_evaluate() -> None:
    """One that was begun before the last push may have met an engine that stood still."""
    metrics = {"eval/x/reward": 1.0, "eval/engines_died": 0.0}
    assert waited(["own"]) == (["begin_round", "wait"], metrics) and waited([]) == (["wait"], metrics)


@pytest.mark.parametrize(
    ("num_died", "error", "raises"),
    [
        (1, RuntimeError("no engine\n  File …"), EvaluationLost),
        (0, RuntimeError("no engine"), ray.exceptions.RayTaskError),  # of something else
        (1, MixedVersions("two versions"), ray.exceptions.RayTaskError),  # never without a word
        (1, ValueError("--eval-config: no such set"), ray.exceptions.RayTaskError),  # another engine would not help
        (1, HookError("--custom-rm-path f: KeyError: 'x'"), ray.exceptions.RayTaskError),
        (1, HookError("no engine", is_own_fault=False), EvaluationLost),  # of a function that asks on its own
    ],
)
def test_an_evaluation_whose_engines_die(num_died: int, error: Exception, raises: type[Exception]) -> None:
    with pytest.raises(raises) as caught:
        waited(["own"], num_died, error)
    if raises is EvaluationLost:
        assert str(caught.value) == "1 of its engines died: no engine"


def test_an_evaluation_goes_on_where_another_engine_takes_over() -> None:
    assert waited(["own"], 1)[1] == {"eval/x/reward": 1.0, "eval/engines_died": 1.0}
