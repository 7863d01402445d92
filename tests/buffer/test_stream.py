"""The stream: generation runs ahead under a bound, and nothing is lost or doubled."""

import asyncio
import gc
import json
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusionrl.buffer.actor import BufferActor
from fusionrl.buffer.collect import EngineEndpoints
from fusionrl.buffer.cursor import BufferStart, Cursors, cursor_of
from fusionrl.buffer.loop_thread import LoopThread
from fusionrl.buffer.rollout_stages import Rollout, warn_without_log_probs
from fusionrl.buffer.schedule import read_schedule
from fusionrl.buffer.stream import check_bound
from fusionrl.buffer.stream_state import StreamGroup
from fusionrl.config.hooks import HookError, load_function
from fusionrl.data.sample import LIST_FIELDS, Sample
from fusionrl.observe.rollouts import rollout_of_step
from fusionrl.pipeline.controller import decide
from fusionrl.pipeline.knobs import Knobs
from fusionrl.pipeline.state import Group, State
from tests.clock import here_s
from tests.own_process import wait_until

HOOKS = Path(__file__).with_name("stream_hooks.py")
Make = Callable[..., "Streaming"]


class Streaming:
    """A Buffer whose stream is under way, and what its driver does."""

    def __init__(self, buffer: BufferActor, hooks: dict[str, Any], first: int = 0) -> None:
        self.buffer, self.hooks, self.step = buffer, hooks, first
        hooks["VERSION"][0] = first
        self.loaded = ""
        self.metrics = list[dict[str, float]]()  # of each rollout
        self.ages = set[int]()  # versions that a token has been behind the newest
        self.in_flight = list[int]()  # samples at each push
        self.cursors = Cursors()
        if buffer.plan.knobs is not None:
            asyncio.run(buffer.begin_stream(first))

    def train(self) -> list[dict[str, Any]]:
        """One rollout, its push if one is due; returns its samples as they were written."""
        knobs, step = self.buffer.plan.knobs, self.step
        rollout = self.fetch()
        self.step += 1
        self.metrics.append(rollout.metrics)
        if knobs and asyncio.run(self.buffer.rollout_trained()):
            self.in_flight.append(len(self.hooks["IN_FLIGHT"]))
            self.hooks["VERSION"][0] = self.step
            asyncio.run(self.buffer.weights_pushed(self.step))
        written = rollout_of_step(Path(self.buffer.run_dir), self.step).path
        rows = [json.loads(line) for line in written.read_text().splitlines()]
        if knobs:
            every = knobs.update_weights_interval
            versions = {version for row in rows for version in row.get("weight_versions") or []}
            self.ages |= {step // every - version // every for version in versions}
        return rows

    def fetch(self) -> Rollout:
        """The next rollout, which is not trained yet."""
        fetch = self.buffer.generate if self.buffer.plan.knobs is None else self.buffer.next_rollout
        rollout = asyncio.run(fetch(self.step))
        self.cursors.add(self.step, rollout.cursor)
        return rollout

    def rows(self, num_steps: int) -> list[dict[str, Any]]:
        return [row for _ in range(num_steps) for row in self.train()]

    def labels(self, num_steps: int) -> list[int]:
        """Prompts of the next rollouts."""
        return labels(self.rows(num_steps))

    def save(self) -> Path:
        """Save after the last rollout, and be killed."""
        path = Path(self.buffer.run_dir).with_name("buffer.json")
        asyncio.run(self.buffer.save(str(path), self.step - 1))
        self.stop()
        return path

    def stop(self) -> None:
        if self.buffer._stream is not None:
            asyncio.run(self.buffer.end_stream())


@pytest.fixture
def stream(make_buffer: Callable[..., BufferActor], write_rows: Callable[..., Path]) -> Iterator[Make]:
    usual = {
        "prompt_data": str(write_rows([{"input": f"p{i}", "label": str(i)} for i in range(40)])),
        "label_key": "label",
        "custom_generate_function_path": "answer",
        "custom_rm_path": "parity",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 4,
        "num_rollout": 8,
    }
    made: list[Streaming] = []
    hooks = load_function(f"{HOOKS}:answer").__globals__
    hooks["CALLS"].clear()
    hooks["FAILS"].clear()

    def make(pipeline: str, resume: Path | None = None, place: BufferStart | None = None, **changes: Any) -> Streaming:
        attempt = 1 if place is not None else 1 + len(made)
        buffer = make_buffer(attempt, hooks=HOOKS, pipeline=pipeline, **usual | changes)
        first = 0 if resume is None else asyncio.run(buffer.load(str(resume))) + 1
        if place is not None:
            asyncio.run(buffer.setup(EngineEndpoints(), place))
            first = place.rollout_id + 1
        loaded = asyncio.run(buffer.state_hash())
        made.append(Streaming(buffer, hooks, first))
        made[-1].loaded = loaded
        return made[-1]

    yield make
    for one in made:
        one.stop()
    assert not hooks["IN_FLIGHT"]


def labels(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["label"]) for row in rows[::2]]


@pytest.mark.parametrize(
    ("pipeline", "bound"), [("stream", 0), ("one-step-off", 1), ("async", 2), ("async-partial", 2)]
)
def test_every_prompt_once_and_no_token_older_than_the_bound(stream: Make, pipeline: str, bound: int) -> None:
    running = stream(pipeline)
    assert sorted(running.labels(8)) == list(range(32))
    assert min(running.ages) == 0 and bool(bound) <= max(running.ages) <= bound
    assert running.in_flight and (pipeline == "async-partial" or not any(running.in_flight))


def test_samples_in_flight_are_bounded(stream: Make) -> None:
    running = stream("async", max_samples_in_flight=3)
    running.hooks["MOST"][0] = 0
    running.rows(3)
    # Groups of two: a third sample has no place for its sibling, but where one of two ends first, another group begins.
    assert 2 <= running.hooks["MOST"][0] <= 3


def test_a_batch_that_is_taken_is_not_kept(stream: Make) -> None:
    running = stream("async")
    batch = running.buffer._running.next_batch()
    samples = [weakref.ref(sample) for group in batch.groups for sample in group]
    del batch
    wait_until(lambda: gc.collect() >= 0 and not any(sample() for sample in samples))


def test_samples_stay_arrays_until_they_are_cut(stream: Make) -> None:
    """A list of numbers takes two to eight times the memory of an array, and longer to read than to answer."""
    running = stream("async-partial")
    batch = running.buffer._running.next_batch()
    warn_without_log_probs([sample for group in batch.groups for sample in group], running.buffer.config)
    fields = [vars(sample)[name] for group in batch.groups for sample in group for name in LIST_FIELDS]
    assert {type(field) for field in fields} <= {np.ndarray, type(None)}
    assert sum(field is not None for field in fields) >= 3 * 8, "tokens, log-probs and versions of eight samples"


def test_decisions_leave_most_of_the_time_to_the_samples(stream: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = list[float]()

    def slow(*given: Any) -> Any:
        """As with thousands of groups."""
        time.sleep(0.005)
        spent.append(0.005)
        return decide(*given)

    monkeypatch.setattr("fusionrl.buffer.stream.decide", slow)
    running = stream("async")
    running.train()
    num_before, start = len(spent), time.perf_counter()
    running.rows(5)
    assert sum(spent[num_before:]) < 0.5 * (time.perf_counter() - start)


def test_a_hook_sees_all_groups_also_those_that_the_filter_refused(stream: Make) -> None:
    flags = {"dynamic_sampling_filter_path": "odd_prompts", "num_rollout": 4}
    running = stream("async", rollout_all_samples_process_path="look_at_all", **flags)
    running.hooks["SEEN"].clear()
    trained = [labels(running.train()) for _ in range(4)]
    seen = running.hooks["SEEN"]
    assert [batch[:4] for batch in seen] == trained
    refused = [label for batch in seen for label in batch[4:]]
    assert refused and not any(label % 2 for label in refused)
    assert len({label for batch in trained for label in batch if label % 2}) == 16
    num_dropped = sum(found["pipeline/tokens_dropped"] for found in running.metrics)
    assert num_dropped == len(refused) * GROUP * LENGTH


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"num_rollout": 2}, ValueError, "nothing left to train"),
        (
            {"custom_generate_function_path": "stale"},
            HookError,
            r"--max-staleness: sample \d+ has a token of version 0",
        ),
        ({"custom_generate_function_path": "cancelled_within"}, RuntimeError, "siblings were cancelled from within"),
        (
            {"custom_generate_function_path": "all_fail", "max_failed_groups": 5},
            *(ValueError, r"5 groups failed one after the other; the last one: 2 of 2 samples of"),
        ),
        ({"rollout_all_samples_process_path": "draws_more"}, HookError, "the stream alone draws prompts"),
        ({"dynamic_sampling_filter_path": "nothing"}, ValueError, "sampling-filter-path .*nothing: it kept 0 of"),
    ],
    ids=str,
)
def test_what_ends_the_run(stream: Make, flags: dict[str, Any], error: type[Exception], words: str) -> None:
    running = stream("async", **flags)
    with pytest.raises(error, match=words):
        running.rows(8)


def test_a_function_that_raises_ends_the_stream_with_its_name_and_sample(stream: Make) -> None:
    running = stream("async", custom_generate_function_path="fails_late")
    with pytest.raises(HookError, match=r"fails_late[\s\S]*no such tool[\s\S]*samples? that it was at"):
        running.rows(8)
    with pytest.raises(HookError, match="no such tool"):
        running.train()


@pytest.mark.parametrize(
    ("pipeline", "changes"),
    [
        ("stream", {"update_weights_interval": 3}),  # saved in the middle of a version
        ("async", {"max_samples_in_flight": 2, "rollout_sample_filter_path": "slow_look"}),
        ("async-partial", {}),
    ],
    ids=str,
)
def test_a_run_that_was_killed_goes_on_with_every_prompt(stream, tmp_path, pipeline, changes) -> None:
    """What was under way at the kill is generated again, before anything else; also at a second kill."""
    trained, resume, path = list[int](), None, tmp_path / "buffer.json"
    for last in (2, 5):
        running = stream(pipeline, resume=resume, **changes)
        trained += running.labels(last - running.step)
        before = asyncio.run(running.buffer.state_hash(last - 1))
        asyncio.run(running.buffer.save(str(path), last - 1))
        running.train()  # of which no checkpoint tells
        running.stop()
        resume = path
    running = stream(pipeline, resume=resume, **changes)
    assert running.step == 5
    trained += running.labels(3)
    assert sorted(trained) == list(range(32))
    assert before == running.loaded
    assert running.buffer._stream.state.next_ordinal == 32  # and not one more was drawn


def test_answers_of_groups_that_are_ready_are_kept(stream: Make) -> None:
    """They are trained after the resume as they were sampled, and nothing is sampled for them again."""
    running = stream("async", max_staleness=2, admission_lead=2.0)
    running.rows(2)
    wait_until(lambda: not running.buffer._stream.state.of("running", "scoring"))
    path = running.save()
    groups = json.loads(path.read_text())["stream"]["groups"].values()
    kept = {int(group["made"][0]["label"]) for group in groups if "made" in group}
    assert len(kept) >= 8
    running = stream("async", max_staleness=2, admission_lead=2.0, resume=path)
    running.hooks["CALLS"].clear()
    rows = running.rows(2)
    assert {int(row["label"]) for row in rows} <= kept
    assert {version for row in rows for version in row["weight_versions"]} <= {0, 1, 2}
    assert kept.isdisjoint(running.hooks["CALLS"])


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(
    ("pipeline", "flags"),
    [("on-policy", {}), ("async-partial", {"admission_lead": 2.0}), ("stream", {"update_weights_interval": 4})],
)
def test_another_buffer_takes_the_place_of_one_that_died(
    stream: Make, tmp_path: Path, pipeline: str, flags: dict[str, Any], is_trained: bool
) -> None:
    """The last rollout that it gave is trained or not. A checkpoint right after its death has the prompts."""
    running = stream(pipeline, **flags)
    trained = running.labels(4 if is_trained else 3)
    if not is_trained:
        running.fetch()
    running.stop()
    done = running.step - 1
    cursor = running.cursors.get(done)
    assert cursor is not None
    groups = [pickle.loads(group) for group in cursor.groups.values()]
    held = {int(group.blank[0].label) for group in groups}
    assert held.isdisjoint(trained) and not any(group.finished for group in groups)
    again = stream(pipeline, place=BufferStart(done, cursor), **flags)
    path = tmp_path / "checkpoint.json"
    asyncio.run(again.buffer.save(str(path), done))
    trained += again.labels(8 - len(trained) // 4)
    assert sorted(trained) == list(range(32)) and (held or pipeline != "async-partial")
    if pipeline != "on-policy":
        saved = json.loads(path.read_text())["stream"]["groups"].values()
        assert {int(group["blank"][0]["label"]) for group in saved} == held
        with pytest.raises(ValueError, match="the Buffer died and groups began again"):
            read_schedule(Path(again.buffer.run_dir))


@pytest.mark.parametrize(
    "changes", [{"rollout_batch_size": 2}, {"max_staleness": 1}, {"pipeline": "on-policy"}], ids=str
)
def test_a_run_goes_on_with_other_settings(stream: Make, changes: dict[str, Any]) -> None:
    """Then what was under way is generated again; no prompt is lost."""
    running = stream("async", admission_lead=2.0)
    trained = running.labels(2)
    given = {"pipeline": "async", "rollout_batch_size": 4, "num_rollout": 4} | changes
    running = stream(**given, resume=running.save())
    trained += running.labels(2)
    count = 8 + 2 * given["rollout_batch_size"]
    assert len(trained) == len(set(trained)) == count and max(trained) < count + 4


def test_a_saved_stream_that_cannot_be_read(stream: Make) -> None:
    running = stream("async")
    running.train()
    path = running.save()
    state = json.loads(path.read_text())
    for change in ({"groups": {}}, {"groups": {"x": 1}}, {"settings": 3, "groups": [1]}, {"state": {}}):
        path.write_text(json.dumps(state | {"stream": state["stream"] | change}))
        with pytest.raises(ValueError, match="what the checkpoint holds of the stream cannot be read"):
            stream("async", resume=path)


def test_a_sample_that_hangs_fails_and_its_group_is_trained_without_it(stream: Make) -> None:
    """It blocks nobody (SkyRL#1173), and takes no siblings with it (prime-rl#2960)."""
    running = stream("async", custom_generate_function_path="first_hangs", sample_timeout=0.5)
    rows = running.rows(2)
    hung = [row for row in rows if row["status"] == "failed"]
    assert {int(row["label"]) for row in hung} == {3} and len(hung) == 1
    assert len(rows) == 16 and len({row["label"] for row in rows}) == 8


def test_a_wait_says_for_whom(stream: Make) -> None:
    running = stream("async", custom_generate_function_path="first_hangs")
    with ThreadPoolExecutor(1) as pool:
        asyncio.run(running.buffer.next_rollout(0))
        waiting = pool.submit(asyncio.run, running.buffer.rollout_trained())
        wait_until(lambda: "waited for: 1 group," in asyncio.run(running.buffer.progress()))
        said = asyncio.run(running.buffer.progress())
        assert "a push waits until no sample is in flight (waited for: 1 group, of sample 6)" in said
        assert "; engines get nothing new: they drain for a push" in said
        running.stop()
        with pytest.raises(RuntimeError, match="the stream has ended"):
            waiting.result(10)


def test_a_group_with_a_failed_sample_is_replaced(stream: Make) -> None:
    """First it is tried again, then another one takes its place."""
    flags = {"sample_timeout": 0.5, "failed_samples": "replace", "max_group_tries": 3}
    running = stream("async", custom_generate_function_path="first_hangs", **flags)
    trained = set(running.labels(3))
    assert len(trained) == 12 and 3 not in trained
    assert running.hooks["CALLS"].count(3) == 6  # three tries of two samples
    assert running.buffer._stream.state.num_dropped == 1


def test_a_group_whose_samples_all_fail_is_replaced(stream: Make) -> None:
    flags = {"custom_generate_function_path": "odd_ones_fail", "max_group_tries": 1}
    running = stream("async", **flags)
    trained = running.labels(2)
    assert len(set(trained)) == 8 and not any(label % 2 for label in trained)
    assert running.metrics[-1]["rollout/dropped_failed"] >= 1


def test_failures_while_trainers_work_end_the_run(stream: Make) -> None:
    """Also where the driver waits for a push that will not come."""
    flags = {"custom_generate_function_path": "failing_when_told", "max_group_tries": 1}
    running = stream("async-partial", max_failed_groups=3, **flags)
    asyncio.run(running.buffer.next_rollout(0))
    running.hooks["FAILS"].set()
    wait_until(lambda: running.buffer._stream.state.failure)
    with pytest.raises(ValueError, match="3 groups failed one after the other"):
        asyncio.run(running.buffer.rollout_trained())


def test_answers_that_another_run_left_are_made_anew(stream: Make) -> None:
    """--partial-rollout of a run without a stream leaves parts of answers, of weights that are gone."""
    running = stream("on-policy")
    running.step = 3
    left = running.buffer.source.draw(2)
    for sample in (sample for group in left for sample in group):
        sample.tokens, sample.response_length, sample.status = [1, 2, 3, 4], 1, Sample.Status.ABORTED
        sample.weight_versions, sample.loss_mask, sample.rollout_log_probs = [0], [1], [-1.0]
    running.buffer.source.take_in(left)
    running.buffer.source.keep(2)
    running = stream("async", resume=running.save())
    rows = running.rows(2)
    assert {0, 1} <= {int(row["label"]) for row in rows} and {row["response_length"] for row in rows} == {4}
    assert min(version for row in rows for version in row["weight_versions"]) >= 3


def test_engines_that_are_back_get_requests(stream: Make) -> None:
    running = stream("async")
    running.train()
    asyncio.run(running.buffer.set_engines(["http://h:1", "http://h:2"]))
    inner = running.buffer._stream
    assert inner._args.engine_urls == ["http://h:1", "http://h:2"]
    assert inner._client._targets.engines == ["http://h:1/generate", "http://h:2/generate"]
    running.train()


def test_a_greedy_answer_beside_the_samples(stream: Make) -> None:
    """ReMax: nothing is in flight at a push, the greedy answers neither."""
    running = stream("one-step-off", advantage_estimator="remax")
    running.rows(4)
    assert running.in_flight and not any(running.in_flight)
    assert running.buffer._stream._live


def test_spare_groups_are_dropped(stream: Make) -> None:
    running = stream("stream", update_weights_interval=1, over_sampling_batch_size=6, num_rollout=3)
    trained = running.labels(3)
    assert len(trained) == len(set(trained)) == 12
    assert running.buffer._stream.state.num_dropped == 6


def test_a_data_source_of_a_user_s_own(stream: Make) -> None:
    """Its own files are written in the stream's thread, and it goes on where it was."""
    flags = {"data_source_path": "Counting"}
    running = stream("async", **flags)
    trained = running.labels(2)
    running = stream("async", **flags, resume=running.save())
    trained += running.labels(2)
    assert len(set(trained)) == 16 and set(range(12)) <= set(trained) <= set(range(18))


def test_a_group_that_was_dropped_is_nobody_s_concern(stream: Make) -> None:
    """Its function may return or raise when it is cancelled."""
    flags = {"at_deadline": "drop", "max_staleness": 1, "num_rollout": 6}
    running = stream("async-partial", custom_generate_function_path="ignores_its_end", **flags)
    rows = running.rows(6)
    assert len({row["label"] for row in rows}) == 24
    assert running.buffer._stream.state.num_dropped > 0


def test_engines_are_not_idle_while_nobody_asks(stream: Make) -> None:
    """Between a push and the next batch, during an evaluation say, generation goes on."""
    running = stream("one-step-off")
    running.train()
    wait_until(lambda: running.buffer._stream.state.next_ordinal >= 12)
    assert running.buffer._stream.state.next_ordinal == 12  # one batch is trained, one is next, one is ahead


@pytest.mark.parametrize("call", ["trained", "pushed"])
def test_an_error_while_trainers_work_names_its_samples(stream: Make, call: str) -> None:
    """The driver hears of it at its next call, whichever that is."""
    running = stream("async-partial", custom_generate_function_path="fails_when_told")
    buffer, hooks = running.buffer, running.hooks
    asyncio.run(buffer.next_rollout(0))
    if call == "pushed":
        assert asyncio.run(buffer.rollout_trained())
    hooks["FAILS"].set()
    buffer._stream._thread.join(5)
    assert not buffer._stream._thread.is_alive()
    made = buffer.rollout_trained() if call == "trained" else buffer.weights_pushed(1)
    with pytest.raises(HookError, match=r"no luck[\s\S]*samples? that it was at"):
        asyncio.run(made)


def test_no_batch_passes_the_bound() -> None:
    """Whatever the controller may think: the last check before the trainers."""
    knobs = Knobs(groups_per_fetch=1, update_weights_interval=2, max_staleness=1)
    sample = Sample(index=7, tokens=[1, 2, 3], response_length=2, weight_versions=[2, 4], loss_mask=[0, 1])
    check_bound([[sample]], 6, knobs)  # the token of version 2 is not trained
    sample.loss_mask = [1, 1]
    check_bound([[sample]], 4, knobs)
    with pytest.raises(HookError, match=r"--max-staleness 1: sample 7 has a token of version 2, and rollout 6 would"):
        check_bound([[sample]], 6, knobs)


def test_answers_do_not_wait_until_all_have_begun(stream: Make) -> None:
    """A version's samples begin a few at a time: to begin thousands takes seconds."""
    flags = {"rollout_batch_size": 10, "n_samples_per_prompt": 16, "num_rollout": 1}
    running = stream("stream", custom_generate_function_path="counts_turns", **flags)
    running.train()
    assert 16 <= running.hooks["IN_TURN"][1] <= 64 < 160


# -------------------------------------------------------------------------------------------------- numbers
LENGTH, PROMPT, GROUP, BATCH = 4, 3, 2, 4  # tokens of a response and a prompt, samples of a group, groups of a batch


@pytest.mark.parametrize("in_flight", ["retract", "in_place"])
def test_tokens_of_samples_that_a_push_found_under_way(stream: Make, in_flight: str) -> None:
    running = stream("async-partial", in_flight=in_flight)
    mixed = sum(len(set(row["weight_versions"])) == 2 for row in running.rows(8))
    prefilled = sum(found["pipeline/tokens_prefilled_again"] for found in running.metrics)
    generated = sum(found["pipeline/tokens_generated"] for found in running.metrics)
    for found in running.metrics:
        assert found["pipeline/tokens_trained"] == BATCH * GROUP * LENGTH and found["pipeline/tokens_dropped"] == 0
        assert found["pipeline/length_trained_by_offered"] == 1.0
        assert 0 <= found["pipeline/credits_used"] <= found["pipeline/credits"] <= (2.5 + 1) * BATCH
        assert found["pipeline/parked"] == 0 and 0 <= found["perf/engines_idle"] <= 1
        waited = found["perf/time_wait_batch_s"] + found["perf/time_wait_deadline_s"]
        assert waited <= found["perf/time_wait_rollout_s"] + here_s(0.01)  # they end in different callbacks
    assert generated >= 8 * BATCH * GROUP * LENGTH and mixed
    # What the push found: the prompt, and the half of the answer that was there.
    own = PROMPT + LENGTH // 2
    assert prefilled >= mixed * own and prefilled % own == 0 if in_flight == "retract" else prefilled == 0


def test_what_is_waited_for_is_timed(stream: Make) -> None:
    """Every fifth prompt takes 0.3 s, and training none: trainers wait for batches, or for groups that are due."""
    running = stream("async", admission_lead=0.5)
    running.rows(8)
    assert sum(found["perf/time_wait_batch_s"] + found["perf/time_wait_deadline_s"] for found in running.metrics) > 0.25


# --------------------------------------------------------------------------------- the stream's thread
class Collector(LoopThread):
    """Dies when it is told, while somebody waits for an answer that it owes."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.owed: Future[int] = Future()

    async def _main(self, started: Future[None]) -> None:
        started.set_result(None)
        await self._wake.wait()
        if self.error is not None:
            raise self.error

    def ask(self) -> int:
        self._post(lambda: None, self.owed)
        return self.owed.result(10)

    def die(self, error: BaseException) -> None:
        self.error = error
        self._loop.call_soon_threadsafe(self._wake.set)


def test_nobody_waits_for_a_thread_that_has_died() -> None:
    """NeMo-RL#3488: a collector was dead for hours, and the trainers waited."""
    collector = Collector()
    collector.start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collector.ask)
        while not collector._asked:
            time.sleep(0.001)
        collector.die(ValueError("no such tool"))
        with pytest.raises(ValueError, match="no such tool"):
            waiting.result(10)
    with pytest.raises(ValueError, match="no such tool"):  # and whoever comes later
        collector._call(lambda: 1)
    collector.stop()


TURNS = {"custom_generate_function_path": "asks", "rollout_max_response_len": 8}


@pytest.mark.parametrize(
    ("pipeline", "flags"),
    [
        ("async", {}),
        ("one-step-off", {"dynamic_sampling_filter_path": "odd_prompts"}),
        ("async", {"at_deadline": "drop", "admission_lead": 2}),
        ("stream", {}),
        ("async-partial", {**TURNS}),
        ("async-partial", {**TURNS, "dynamic_sampling_filter_path": "odd_prompts"}),
    ],
)
def test_a_run_follows_the_order_of_a_record(
    stream: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str, flags: dict[str, Any]
) -> None:
    """Other prompts are slow in the second run: without the record other groups would be ready first."""
    orders = []
    for run, slow in (("first", 5), ("second", 3)):
        record = {"replay_schedule": str(tmp_path / "first")} if run == "second" else {}
        made = stream(pipeline, run=run, **flags, **record)
        seconds = lambda sample, _=0, slow=slow: 0.2 if int(sample.label) % slow == 0 else 0.01  # noqa: E731
        monkeypatch.setitem(made.hooks, "seconds", seconds)
        rows = [{k: v for k, v in row.items() if k != "session_id"} for row in made.rows(8)]
        numbers = [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in made.metrics]
        made.stop()
        (file,) = (tmp_path / run).glob("schedule.a*.jsonl")
        orders.append((rows, numbers, file.read_text()))
    for first, second in zip(*orders, strict=True):
        assert first == second
    spans_versions = any(len(set(row["weight_versions"])) > 1 for row in orders[0][0])
    assert spans_versions == (pipeline == "async-partial")


def test_a_run_that_leaves_its_record_ends(stream: Make, tmp_path: Path) -> None:
    """Its filter drops a group that the record has as ready."""
    first = stream("async", run="first")
    first.rows(2)
    first.stop()
    record = str(tmp_path / "first")
    second = stream("async", run="second", replay_schedule=record, dynamic_sampling_filter_path="odd_prompts")
    with pytest.raises(ValueError, match=r"the record has GroupReady \d+ where this run comes to Drop \d+ filtered"):
        second.rows(2)


def test_a_group_that_cannot_be_sent_leaves_no_cursor() -> None:
    state = State(lease=(1,), groups={0: Group(0, "running", 0), 1: Group(1, "leased", 0)})
    source: Any = SimpleNamespace(can_be_restored=True, state=lambda: {"n": 2})
    live = {0: StreamGroup([Sample(metadata={"hook": lambda: None})])}
    assert cursor_of(source, state, live) is None
    live[0].blank[0].metadata = {}
    cursor, cursors = cursor_of(source, state, live), Cursors()
    assert cursor is not None and list(cursor.groups) == ["0"] and cursor.source == {"n": 2}
    following = cursor_of(source, state, live)
    assert following is not None and following.groups == {}  # it is known
    cursors.add(7, following)  # but the one that has it was lost
    assert cursors.get(7) is None
    cursors.add(8, cursor)
    cursors.add(9, following)
    found = cursors.get(9)
    assert found is not None and found.groups == cursor.groups
