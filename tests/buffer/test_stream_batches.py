"""Rollout functions of a user's own under the controller: the bound holds, whatever they keep under way."""

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer import stream_batches
from fusionrl.buffer.stream import Groups
from fusionrl.buffer.stream_batches import AdmissionSource, BatchStream
from fusionrl.compat.slime.api import fully_async
from fusionrl.config.hooks import HookError
from fusionrl.data.sample import Sample
from fusionrl.rollout.event_loop import run
from tests.buffer import batch_hooks
from tests.buffer.test_stream import Make, stream
from tests.own_process import wait_until

__all__ = ["stream"]  # the fixture
HOOKS = "tests.buffer.batch_hooks"
ENDING = f"{Path(__file__).with_name('stream_hooks.py')}:Ending"
STALE = r"--max-staleness 1: sample \d+ has a token of version 0, and rollout 2 would"
PIPELINES = [("stream", 0), ("one-step-off", 1), ("async", 2), ("async-partial", 2)]


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    for kept in (batch_hooks.DRAWN, batch_hooks.CALLS, batch_hooks.LOST):
        kept.clear()
    yield
    end_worker()


def end_worker() -> None:
    while batch_hooks.WORKER:
        worker = batch_hooks.WORKER.pop()
        worker.ends.set()
        worker.thread.join(10)


@pytest.fixture(autouse=True)
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that drops groups and asks on gets others soon; one that holds them may be slow on a busy machine."""
    if request.node.get_closest_marker("impatient") is not None:
        monkeypatch.setattr(stream_batches, "_PATIENCE_S", 0.1)


@pytest.mark.parametrize(
    ("pipeline", "bound", "function"),
    [*[(*pipeline, "fully_asynchronous") for pipeline in PIPELINES], ("async", 2, "whole_batches")],
)
def test_every_prompt_once_and_no_token_older_than_the_bound(stream, pipeline, bound, function) -> None:
    running = stream(pipeline, rollout_function_path=f"{HOOKS}.{function}", custom_generate_function_path=None)
    trained = list[int]()
    for step in range(8):
        trained += running.labels(1)
        if pipeline == "async":  # the pool asks for 64 groups; 4 are trained by a version, and it may be one ahead
            assert len(batch_hooks.DRAWN) <= (step + 3) * 4
    assert sorted(trained) == list(range(32))
    assert min(running.ages) == 0 and max(running.ages) <= bound
    assert batch_hooks.CALLS[0] == 0 and sorted(batch_hooks.CALLS) == batch_hooks.CALLS
    assert max(batch_hooks.CALLS) <= 7
    if function == "fully_asynchronous" and bound:
        assert max(running.ages) >= 1


@pytest.mark.parametrize(
    ("function", "pipeline", "bound"),
    [
        ("filtering", "stream", 0),
        ("filtering", "async", 2),
        ("filtering_in_turn", "one-step-off", 1),
        ("filtering_in_pool", "async", 2),
        pytest.param("polite", "stream", 0, marks=pytest.mark.impatient),
    ],
)
def test_a_function_that_drops_groups_gets_others(stream: Make, pipeline: str, bound: int, function: str) -> None:
    running = stream(pipeline, rollout_function_path=f"{HOOKS}.{function}", num_rollout=4)
    trained = running.labels(4)
    assert len(set(trained)) == 16 and all(label % 2 for label in trained) and max(running.ages) <= bound
    state = running.buffer._stream.state
    assert state.num_dropped >= 14 and len(state.groups) <= 4
    # A batch of groups that an earlier call returned has none.
    assert function != "filtering" or 1.0 in [metrics.get("rollout/mine") for metrics in running.metrics]


def test_groups_that_were_handed_back_come_first_and_are_as_old_as_they_are(stream: Make) -> None:
    running = stream("async", rollout_function_path=f"{HOOKS}.partial", max_staleness=3, admission_lead=2.0)
    rows = running.rows(6)
    trained = {int(row["label"]) for row in rows}
    assert trained == set(range(24))
    assert len(batch_hooks.DRAWN) > 24 and set(batch_hooks.DRAWN[4:8]) <= set(batch_hooks.DRAWN[8:])


@pytest.mark.parametrize("pipeline", ["stream", "async"])
def test_prompts_from_elsewhere(stream: Make, pipeline: str) -> None:
    """They are trained as they come, also after a resume in the middle of a step, with another batch ready or not."""
    flags = {"rollout_function_path": f"{HOOKS}.from_elsewhere"}
    running = stream(pipeline, **flags)
    trained = running.labels(2)
    asyncio.run(running.buffer.next_rollout(2))  # under way, and not trained
    if pipeline == "async":
        wait_until(lambda: len(running.buffer._stream.state.of("ready")) == 4)
    running = stream(pipeline, resume=running.save(), **flags)
    trained += running.labels(2)
    assert sorted(trained) == list(range(100, 116))


def test_long_answers_are_not_given_up_where_a_call_gives_one_group(stream: Make) -> None:
    running = stream("async", rollout_function_path=f"{HOOKS}.one_by_one", update_weights_interval=1)
    trained = running.labels(8)
    assert sorted(trained) == list(range(32))


def test_a_group_that_was_given_up_comes_too_late(stream: Make, caplog: pytest.LogCaptureFixture) -> None:
    running = stream("async", rollout_function_path=f"{HOOKS}.late", max_staleness=1, num_rollout=8)
    trained = running.labels(8)
    lost, *_ = batch_hooks.LOST
    assert len(set(trained)) == 32 and int(lost[0].label) not in trained and len(batch_hooks.LOST) == 2
    assert "so given up" in caplog.text and running.buffer._stream.state.num_dropped >= 1


def test_a_group_that_a_later_call_returns_is_trained(stream: Make, caplog: pytest.LogCaptureFixture) -> None:
    """And the function is known as one that keeps groups: no further one is dropped."""
    running = stream("async", rollout_function_path=f"{HOOKS}.keeps_one")
    trained = running.labels(6)
    assert len(set(trained)) == 24 and {int(group[0].label) for group in batch_hooks.LOST[:2]} <= set(trained)
    assert caplog.text.count("Give it the attribute keeps_groups = True") == 1


def test_a_kept_group_that_the_filter_refuses_is_free_at_once(stream: Make, caplog: pytest.LogCaptureFixture) -> None:
    flags = {"dynamic_sampling_filter_path": f"{HOOKS}.odd_prompts", "num_rollout": 4}
    running = stream("async", rollout_function_path=f"{HOOKS}.keeps_unscored", **flags)
    trained = running.labels(4)
    assert len(set(trained)) == 16 and all(label % 2 for label in trained)
    assert "given up" not in caplog.text and len(batch_hooks.CALLS) < 20


@pytest.mark.impatient
def test_a_call_gets_no_second_batch_beside_the_one_it_has(stream: Make) -> None:
    running = stream("stream", rollout_function_path=f"{HOOKS}.asks_for_more", update_weights_interval=1)
    running.train()
    assert batch_hooks.LOST[0] == 1


def test_groups_that_a_function_numbers_itself_are_no_late_ones(stream: Make, caplog: pytest.LogCaptureFixture) -> None:
    running = stream("stream", rollout_function_path=f"{HOOKS}.own_numbers")
    running.rows(3)
    assert "keeps_groups" not in caplog.text


@pytest.mark.parametrize(
    ("says", "kept"),
    [(True, {"call", "handed", "pool", "thread", "worker"}), (None, {"thread", "worker"}), (False, {"worker"})],
)
def test_which_groups_stay_with_the_function(says: bool | None, kept: set[str]) -> None:
    """Those of a living thread of its own and of a fully asynchronous worker, or what its attribute says."""
    drawn: dict[str, Callable[[], bool]] = {}
    where = ContextVar("where", default="thread")

    def give(num_groups: int, is_kept: Callable[[], bool], beyond: bool) -> Groups:
        drawn[where.get()] = is_kept
        return [[Sample()]]

    source = AdmissionSource(give, list.clear, None, says)

    def draw(place: str) -> None:
        where.set(place)
        source.get_samples(1)

    async def handed() -> None:
        draw("handed")

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

    async def begin(args: Namespace, groups: Groups) -> None: ...

    with ThreadPoolExecutor(1) as own:
        caller = threading.Thread(target=call)
        caller.start()
        own.submit(draw, "thread").result(30)
        caller.join(30)
        assert {place for place, is_kept in drawn.items() if is_kept()} == kept and len(drawn) == 5
    assert drawn["thread"]() == bool(says), "its thread has ended"


def test_parts_of_answers_go_on_after_a_resume_with_their_age(stream: Make) -> None:
    flags = {"max_staleness": 3, "admission_lead": 2.0, "rollout_function_path": f"{HOOKS}.partial"}
    running = stream("async", **flags)
    trained = set(running.labels(3))
    path = running.save()
    groups = json.loads(path.read_text())["stream"]["groups"].values()
    assert any("parked" in group for group in groups)
    assert all(sample["response_length"] == 0 for group in groups for sample in group["blank"])
    running = stream("async", resume=path, **flags)
    trained |= set(running.labels(3))
    assert trained == set(range(24))


@pytest.mark.parametrize(
    ("pipeline", "flags", "error", "words"),
    [
        ("one-step-off", {}, HookError, r"raises[\s\S]*no such batch"),
        ("one-step-off", {}, HookError, STALE),
        ("async", {}, ValueError, r"--rollout-function-path .*nothing: 10 calls in a row gave no"),
        # It keeps a group that was given up, which counts no longer.
        ("async", {"max_staleness": 1}, ValueError, "10 calls in a row gave no group"),
        # All batches before the end of the data are trained.
        ("async", {"admission_lead": 2.0, "data_source_path": ENDING}, ValueError, "the data ended after 3 of 8"),
    ],
    ids=("raises", "stale", "nothing", "ends_early", "whole_batches"),
)
def test_what_ends_the_run(stream, request, pipeline, flags, error, words) -> None:
    running = stream(pipeline, rollout_function_path=f"{HOOKS}.{request.node.callspec.id}", **flags)
    with pytest.raises(error, match=words):
        running.rows(8)


def test_tokens_that_become_too_old_before_they_are_fetched(stream: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are within the bound when the third call hands them over; the push comes before their fetch."""
    calls, take = list[Any](), BatchStream._take
    monkeypatch.setattr(BatchStream, "_take", lambda self, output: calls.append(take(self, output)))
    running = stream("one-step-off", rollout_function_path=f"{HOOKS}.stale")
    running.train()
    asyncio.run(running.buffer.next_rollout(1))
    wait_until(lambda: len(calls) >= 3)
    assert asyncio.run(running.buffer.rollout_trained())
    asyncio.run(running.buffer.weights_pushed(2))
    with pytest.raises(HookError, match=STALE):
        asyncio.run(running.buffer.next_rollout(2))


@pytest.mark.parametrize("function", ["whole_batches", "fully_asynchronous"])
def test_a_run_that_was_killed_goes_on_with_every_prompt(stream: Make, tmp_path: Path, function: str) -> None:
    flags = {"rollout_function_path": f"{HOOKS}.{function}", "custom_generate_function_path": None}
    path = tmp_path / "buffer.json"
    running = stream("async", **flags)
    trained = running.labels(3)
    asyncio.run(running.buffer.save(str(path), 2))
    running.train()
    running.stop()
    end_worker()
    running = stream("async", resume=path, **flags)
    trained += running.labels(5)
    assert sorted(trained) == list(range(32))


def test_the_wait_for_its_first_batch_is_timed(stream: Make) -> None:
    """It answers when the trainers wait, and not before."""
    batch_hooks.MAY_ANSWER.clear()
    try:
        flags = {"rollout_function_path": f"{HOOKS}.whole_batches", "custom_generate_function_path": None}
        running = stream("async", num_rollout=4, **flags)
        with ThreadPoolExecutor(1) as trainers:
            trained = trainers.submit(running.train)
            wait_until(lambda: trained.done() or running.buffer._stream.waits_for())
            batch_hooks.MAY_ANSWER.set()
            assert len(trained.result(30)) == 4 * 2
    finally:
        batch_hooks.MAY_ANSWER.set()
    assert running.metrics[0]["perf/time_wait_batch_s"] > 0


def test_its_tokens_are_counted(stream: Make) -> None:
    """Four groups of two samples with four tokens each; what the function drops is gone before anyone counts it."""
    running = stream("async", rollout_function_path=f"{HOOKS}.filtering", num_rollout=4)
    running.rows(4)
    names = ("generated", "trained", "dropped")
    sums = [sum(metrics[f"pipeline/tokens_{name}"] for metrics in running.metrics) for name in names]
    assert sums == [4 * 4 * 2 * 4, 4 * 4 * 2 * 4, 0.0]
    assert all(0 <= metrics["perf/engines_idle"] <= 1 for metrics in running.metrics)
    assert running.metrics[-1]["pipeline/length_trained_by_offered"] == 1.0
