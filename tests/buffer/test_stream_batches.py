"""Rollout functions of a user's own under the controller: the bound holds, whatever they keep under way."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer import stream_batches
from fusionrl.buffer.admission import AdmissionSource
from fusionrl.buffer.stream import Groups
from fusionrl.buffer.stream_batches import BatchStream
from fusionrl.compat.slime.api import fully_async
from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.rollout.event_loop import run
from fusionrl.rollout.types import RolloutFnTrainOutput
from tests.buffer import batch_hooks
from tests.buffer.test_stream import Make, labels, stream

__all__ = ["stream"]  # the fixture
HOOKS = "tests.buffer.batch_hooks"
PIPELINES = [("stream", 0), ("one-step-off", 1), ("async", 2), ("async-partial", 2)]


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    for kept in (batch_hooks.DRAWN, batch_hooks.CALLS, batch_hooks.LOST):
        kept.clear()
    yield
    while batch_hooks.WORKER:
        worker = batch_hooks.WORKER.pop()
        worker.ends.set()
        worker.thread.join(10)


@pytest.fixture(autouse=True)
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that drops groups and asks on gets others soon; one that holds them may be slow on a busy machine."""
    if request.node.get_closest_marker("impatient") is not None:
        monkeypatch.setattr(stream_batches, "_PATIENCE_S", 0.1)


def ages(step: int, rows: list[dict[str, Any]], interval: int) -> set[int]:
    return {(step // interval) - number // interval for row in rows for number in row["weight_versions"]}


@pytest.mark.parametrize(
    ("pipeline", "bound", "function"),
    [*[(*pipeline, "fully_asynchronous") for pipeline in PIPELINES], *[(*p, "whole_batches") for p in PIPELINES[1:3]]],
)
def test_every_prompt_once_and_no_token_older_than_the_bound(
    stream: Make, pipeline: str, bound: int, function: str
) -> None:
    running = stream(pipeline, rollout_function_path=f"{HOOKS}.{function}", custom_generate_function_path=None)
    interval, trained, seen = running.buffer.plan.knobs.fetches_per_push, list[int](), set[int]()
    for step in range(8):
        rows = running.train()
        trained += labels(rows)
        seen |= ages(step, rows, interval)
        if pipeline == "async":  # the pool asks for 64 groups; 4 are trained by a version, and it may be one ahead
            assert len(batch_hooks.DRAWN) <= (step + 3) * 4
    assert sorted(trained) == list(range(32))
    assert min(seen) == 0 and max(seen) <= bound
    assert batch_hooks.CALLS[0] == 0 and sorted(batch_hooks.CALLS) == batch_hooks.CALLS
    assert max(batch_hooks.CALLS) <= 7
    if function == "fully_asynchronous" and bound:
        assert max(seen) >= 1


@pytest.mark.parametrize(
    ("function", "pipeline", "bound"),
    [
        *[("filtering", *pipeline) for pipeline in PIPELINES[:3]],
        ("filtering_in_turn", "one-step-off", 1),
        ("filtering_in_pool", "async", 2),
        pytest.param("polite", "stream", 0, marks=pytest.mark.impatient),
    ],
)
def test_a_function_that_drops_groups_gets_others(stream: Make, pipeline: str, bound: int, function: str) -> None:
    running = stream(pipeline, rollout_function_path=f"{HOOKS}.{function}", num_rollout=4)
    interval, trained, seen = running.buffer.plan.knobs.fetches_per_push, list[int](), set[int]()
    metrics: dict[str, float] = {}
    for step in range(4):
        rows = running.train()
        trained += labels(rows)
        seen |= ages(step, rows, interval)
        metrics |= running.buffer._last_metrics  # a batch of groups that an earlier call returned has none of a call
    assert len(set(trained)) == 16 and all(label % 2 for label in trained)
    assert max(seen) <= bound
    state = running.buffer._stream.state
    assert state.num_dropped >= 14 and len(state.groups) <= 4
    if function == "filtering":
        assert metrics["rollout/mine"] == 1.0


def test_groups_that_were_handed_back_come_first_and_are_as_old_as_they_are(stream: Make) -> None:
    running = stream("async", rollout_function_path=f"{HOOKS}.partial", max_staleness=3, admission_lead=2.0)
    rows = [row for rows in running.steps(6) for row in rows]
    trained = {int(row["label"]) for row in rows}
    assert trained == set(range(24))
    assert len(batch_hooks.DRAWN) > 24 and set(batch_hooks.DRAWN[4:8]) <= set(batch_hooks.DRAWN[8:])


@pytest.mark.parametrize("pipeline", ["stream", "async"])
def test_prompts_from_elsewhere(stream: Make, tmp_path: Path, pipeline: str) -> None:
    """They are trained as they come, also after a resume in the middle of a step."""
    flags, path = {"rollout_function_path": f"{HOOKS}.from_elsewhere"}, tmp_path / "buffer.json"
    running = stream(pipeline, **flags)
    trained = [label for rows in running.steps(2) for label in labels(rows)]
    asyncio.run(running.buffer.next_rollout(2))  # under way, and not trained
    asyncio.run(running.buffer.save(str(path), 1))
    running.stop()
    running = stream(pipeline, resume=path, **flags)
    trained += [label for rows in running.steps(2) for label in labels(rows)]
    assert len(trained) == len(set(trained)) == 16 and min(trained) >= 100


def test_long_answers_are_not_given_up_where_a_call_gives_one_group(stream: Make) -> None:
    running = stream("async", rollout_function_path=f"{HOOKS}.one_by_one", update_weights_interval=1)
    trained = [label for rows in running.steps(8) for label in labels(rows)]
    assert sorted(trained) == list(range(32))


def test_a_group_that_was_given_up_comes_too_late(stream: Make, caplog: pytest.LogCaptureFixture) -> None:
    running = stream("async", rollout_function_path=f"{HOOKS}.late", max_staleness=1, num_rollout=8)
    trained = [label for rows in running.steps(8) for label in labels(rows)]
    lost, *_ = batch_hooks.LOST
    assert len(set(trained)) == 32 and int(lost[0].label) not in trained and len(batch_hooks.LOST) == 2
    assert "so given up" in caplog.text and running.buffer._stream.state.num_dropped >= 1


def test_a_group_that_a_later_call_returns_is_trained(stream: Make, caplog: pytest.LogCaptureFixture) -> None:
    """And the function is known as one that keeps groups: no further one is dropped."""
    running = stream("async", rollout_function_path=f"{HOOKS}.keeps_one")
    trained = [label for rows in running.steps(6) for label in labels(rows)]
    assert len(set(trained)) == 24 and {int(group[0].label) for group in batch_hooks.LOST[:2]} <= set(trained)
    assert caplog.text.count("Give it the attribute keeps_groups = True") == 1


def test_a_kept_group_that_the_filter_refuses_is_free_at_once(stream: Make, caplog: pytest.LogCaptureFixture) -> None:
    flags = {"dynamic_sampling_filter_path": f"{HOOKS}.odd_prompts", "num_rollout": 4}
    running = stream("async", rollout_function_path=f"{HOOKS}.keeps_unscored", **flags)
    trained = [label for rows in running.steps(4) for label in labels(rows)]
    assert len(set(trained)) == 16 and all(label % 2 for label in trained)
    assert "given up" not in caplog.text and len(batch_hooks.CALLS) < 20


def test_a_group_that_was_given_up_counts_no_longer(stream: Make) -> None:
    """A function that returns nothing more ends the run, though it keeps that one."""
    running = stream("async", rollout_function_path=f"{HOOKS}.ends_early", max_staleness=1)
    with pytest.raises(ValueError, match="10 calls in a row gave no group"):
        running.steps(8)


@pytest.mark.impatient
def test_a_call_gets_no_second_batch_beside_the_one_it_has(stream: Make) -> None:
    running = stream("stream", rollout_function_path=f"{HOOKS}.asks_for_more", update_weights_interval=1)
    running.train()
    assert batch_hooks.LOST[0] == 1


def test_groups_that_a_function_numbers_itself_are_no_late_ones(stream: Make, caplog: pytest.LogCaptureFixture) -> None:
    running = stream("stream", rollout_function_path=f"{HOOKS}.own_numbers")
    running.steps(3)
    assert "keeps_groups" not in caplog.text


@pytest.mark.parametrize(
    ("says", "kept"),
    [(True, {"call", "handed", "pool", "thread", "worker"}), (None, {"thread", "worker"}), (False, {"worker"})],
)
def test_which_groups_stay_with_the_function(says: bool | None, kept: set[str]) -> None:
    """Those of a living thread of its own and of a fully asynchronous worker, or what its attribute says."""
    drawn: dict[str, Callable[[], bool]] = {}
    ends = threading.Event()

    def give(num_groups: int, is_kept: Callable[[], bool], beyond: bool) -> Groups:
        drawn[where.get()] = is_kept
        return [[Sample()]]

    where = ContextVar("where", default="thread")
    source = AdmissionSource(give, list.clear, None, says)

    def draw(place: str) -> None:
        where.set(place)
        source.get_samples(1)

    async def handed() -> None:
        draw("handed")

    def stay() -> None:
        draw("thread")
        has_drawn.set()
        ends.wait()

    def call() -> None:
        source.begin_call()
        draw("call")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(draw, "pool").result()
        run(handed())
        where.set("worker")
        worker = fully_async.AsyncRolloutWorker(Namespace(), source, 1)
        worker._begin = begin  # type: ignore[method-assign]
        worker.start()
        worker.fill()

    async def begin(args: Namespace, groups: Groups) -> None:
        pass

    has_drawn = threading.Event()
    threads = [threading.Thread(target=function) for function in (call, stay)]
    for thread in threads:
        thread.start()
    threads[0].join(30)
    assert has_drawn.wait(30)
    assert {place for place, is_kept in drawn.items() if is_kept()} == kept and len(drawn) == 5
    ends.set()
    threads[1].join(30)
    assert drawn["thread"]() == bool(says), "its thread has ended"


def test_parts_of_answers_go_on_after_a_resume_with_their_age(stream: Make, tmp_path: Path) -> None:
    flags = {"max_staleness": 3, "admission_lead": 2.0, "rollout_function_path": f"{HOOKS}.partial"}
    path = tmp_path / "buffer.json"
    running = stream("async", **flags)
    trained = {label for rows in running.steps(3) for label in labels(rows)}
    asyncio.run(running.buffer.save(str(path), 2))
    running.stop()
    groups = json.loads(path.read_text())["stream"]["groups"].values()
    assert any("parked" in group for group in groups)
    assert all(sample["response_length"] == 0 for group in groups for sample in group["blank"])
    running = stream("async", resume=path, **flags)
    trained |= {label for rows in running.steps(3) for label in labels(rows)}
    assert trained == set(range(24))


def test_the_end_of_the_data_is_told(stream: Make) -> None:
    """And all batches before it are trained."""
    source = str(Path(__file__).with_name("stream_hooks.py")) + ":Ending"
    flags = {"rollout_function_path": f"{HOOKS}.whole_batches", "data_source_path": source}
    running = stream("async", admission_lead=2.0, **flags)
    assert len({label for rows in running.steps(3) for label in labels(rows)}) == 12
    with pytest.raises(ValueError, match="the data ended after 3 of 8"):
        running.train()


def test_tokens_that_are_too_old_are_not_trained(stream: Make) -> None:
    running = stream("one-step-off", rollout_function_path=f"{HOOKS}.stale")
    with pytest.raises(HookError, match=r"--max-staleness 1: sample \d+ has a token of version 0, and version 2 would"):
        running.steps(4)


def test_tokens_that_become_too_old_before_they_are_fetched(stream: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are within the bound when the third call hands them over; the push comes before their fetch."""
    calls, take, third = [0], BatchStream._take, threading.Event()

    def noted(self: BatchStream, output: RolloutFnTrainOutput) -> None:
        take(self, output)
        calls[0] += 1
        if calls[0] == 3:
            third.set()

    monkeypatch.setattr(BatchStream, "_take", noted)
    running = stream("one-step-off", rollout_function_path=f"{HOOKS}.stale")
    running.train()
    asyncio.run(running.buffer.next_rollout(1))
    assert third.wait(60)
    assert asyncio.run(running.buffer.rollout_trained())
    asyncio.run(running.buffer.weights_pushed(2))
    with pytest.raises(HookError, match=r"--max-staleness 1: sample \d+ has a token of version 0, and version 2 would"):
        asyncio.run(running.buffer.next_rollout(2))


def test_a_function_that_returns_nothing_ends_the_run(stream: Make) -> None:
    running = stream("async", rollout_function_path=f"{HOOKS}.nothing")
    with pytest.raises(ValueError, match=r"--rollout-function-path .*nothing: 10 calls in a row gave no"):
        running.train()


def test_an_error_ends_the_run_with_the_function_s_name(stream: Make) -> None:
    running = stream("one-step-off", rollout_function_path=f"{HOOKS}.raises")
    with pytest.raises(HookError, match=r"raises[\s\S]*no such batch"):
        running.steps(3)


@pytest.mark.parametrize("function", ["whole_batches", "fully_asynchronous"])
def test_a_run_that_was_killed_goes_on_with_every_prompt(stream: Make, tmp_path: Path, function: str) -> None:
    flags = {"rollout_function_path": f"{HOOKS}.{function}", "custom_generate_function_path": None}
    path = tmp_path / "buffer.json"
    running = stream("async", **flags)
    trained = [label for rows in running.steps(3) for label in labels(rows)]
    asyncio.run(running.buffer.save(str(path), 2))
    running.train()
    running.stop()
    if batch_hooks.WORKER:
        worker = batch_hooks.WORKER.pop()
        worker.ends.set()
        worker.thread.join(10)
    running = stream("async", resume=path, **flags)
    trained += [label for rows in running.steps(5) for label in labels(rows)]
    assert sorted(trained) == list(range(32))


def test_the_wait_for_its_first_batch_is_timed(stream: Make) -> None:
    """It answers when the trainers wait, and not before."""
    batch_hooks.MAY_ANSWER.clear()
    try:
        flags = {"rollout_function_path": f"{HOOKS}.whole_batches", "custom_generate_function_path": None}
        running = stream("async", num_rollout=4, **flags)
        with ThreadPoolExecutor(1) as trainers:
            trained = trainers.submit(running.train)
            while not trained.done() and not running.buffer._stream.waits_for():
                time.sleep(0.01)
            batch_hooks.MAY_ANSWER.set()
            assert len(trained.result(30)) == 4 * 2
    finally:
        batch_hooks.MAY_ANSWER.set()
    assert running.buffer._last_metrics["perf/time_wait_batch_s"] > 0


def test_its_tokens_are_counted(stream: Make) -> None:
    """Four groups of two samples with four tokens each; what the function drops is gone before anyone counts it."""
    running = stream("async", rollout_function_path=f"{HOOKS}.filtering", num_rollout=4)
    sums = dict.fromkeys(("generated", "trained", "dropped"), 0.0)
    for _ in range(4):
        running.train()
        found = running.buffer._last_metrics
        sums = {name: count + found[f"pipeline/tokens_{name}"] for name, count in sums.items()}
        assert 0 <= found["perf/engines_idle"] <= 1
    assert sums == {"generated": 4 * 4 * 2 * 4, "trained": 4 * 4 * 2 * 4, "dropped": 0.0}
    assert found["pipeline/length_trained_by_offered"] == 1.0
