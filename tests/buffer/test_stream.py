"""The stream: generation runs ahead under a bound, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionrl.buffer.actor import BufferActor, EngineEndpoints
from fusionrl.config.config import Config
from fusionrl.config.hooks import HookError, load_function
from fusionrl.models.shape import read_model_shape
from fusionrl.observe.rollouts import list_rollouts
from fusionrl.plan.plan import make_plan

HOOKS = Path(__file__).with_name("stream_hooks.py")
NUM_PROMPTS = 40
Make = Callable[..., "Streaming"]


class Streaming:
    """A Buffer whose stream is under way, and what its driver does."""

    def __init__(self, buffer: BufferActor, hooks: dict[str, Any], first: int = 0) -> None:
        self.buffer, self.hooks, self.step = buffer, hooks, first
        hooks["VERSION"][0] = first
        asyncio.run(buffer.begin_stream(first))

    def train(self) -> list[dict[str, Any]]:
        """One rollout, its push if one is due; returns its samples as they were written."""
        asyncio.run(self.buffer.next_rollout(self.step))
        self.step += 1
        if asyncio.run(self.buffer.rollout_trained()):
            self.in_flight_at_push = len(self.hooks["IN_FLIGHT"])
            self.hooks["VERSION"][0] = self.step
            asyncio.run(self.buffer.weights_pushed(self.step))
        newest = max(list_rollouts(self.buffer.run_dir), key=lambda found: found.path.stat().st_mtime_ns)
        return [json.loads(line) for line in newest.path.read_text().splitlines()]

    def steps(self, count: int) -> list[list[dict[str, Any]]]:
        return [self.train() for _ in range(count)]

    def stop(self) -> None:
        asyncio.run(self.buffer.end_stream())


@pytest.fixture
def stream(tiny_model: Path, write_rows: Callable[..., Path], tmp_path: Path) -> Iterator[Make]:
    data = write_rows([{"input": f"p{i}", "label": str(i)} for i in range(NUM_PROMPTS)])
    made: list[Streaming] = []
    hooks = load_function(f"{HOOKS}:answer").__globals__

    def make(pipeline: str, resume: Path | None = None, **changes: Any) -> Streaming:
        values = {
            "hf_checkpoint": str(tiny_model),
            "prompt_data": str(data),
            "label_key": "label",
            "custom_generate_function_path": f"{HOOKS}:answer",
            "custom_rm_path": f"{HOOKS}:parity",
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 4,
            "num_rollout": 8,
            "pipeline": pipeline,
        }
        config = Config.from_flat(values | changes)
        plan = make_plan(config, read_model_shape(tiny_model), device="cpu", num_prompts=NUM_PROMPTS)
        attempt = 1 if resume is None else 2
        buffer = BufferActor(config, plan, str(tmp_path / "run"), attempt, put=lambda shard: shard)
        asyncio.run(buffer.setup(EngineEndpoints()))
        first = 0 if resume is None else asyncio.run(buffer.load(str(resume))) + 1
        made.append(Streaming(buffer, hooks, first))
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
    running, trained, ages = stream(pipeline), [], set()
    interval = running.buffer.plan.knobs.fetches_per_push
    for step in range(8):
        rows = running.train()
        trained += labels(rows)
        version = step // interval * interval
        ages |= {(version - number) // interval for row in rows for number in row["weight_versions"]}
        if pipeline != "async-partial":
            assert step % interval < interval - 1 or running.in_flight_at_push == 0
    assert sorted(trained) == list(range(32))
    assert max(ages) <= bound and min(ages) == 0
    assert pipeline == "stream" or max(ages) >= 1


def test_a_push_goes_into_samples_that_run(stream: Make) -> None:
    """Their tokens have two versions; the group is as old as the older one."""
    running = stream("async-partial")
    mixed = [row for _ in range(8) for row in running.train() if len(set(row["weight_versions"])) == 2]
    assert mixed and all(row["weight_versions"][0] < row["weight_versions"][-1] for row in mixed)


def test_samples_in_flight_are_bounded(stream: Make) -> None:
    running = stream("async", max_samples_in_flight=3)
    running.hooks["MOST"][0] = 0
    for _ in range(3):
        running.train()
    assert running.hooks["MOST"][0] == 2  # groups of two: a third sample has no place for its sibling


def test_a_filter_drops_and_others_come(stream: Make) -> None:
    running = stream("async", dynamic_sampling_filter_path=f"{HOOKS}:odd_prompts", num_rollout=4)
    trained = [label for _ in range(4) for label in labels(running.train())]
    assert trained == sorted(trained) == list(range(1, 33, 2)) or all(label % 2 for label in trained)
    assert len(set(trained)) == 16


def test_a_function_that_raises_ends_the_stream_with_its_name_and_sample(stream: Make) -> None:
    running = stream("async", custom_generate_function_path=f"{HOOKS}:fails_late")
    with pytest.raises(HookError, match=r"fails_late[\s\S]*no such tool[\s\S]*samples? that it was at"):
        running.steps(8)
    with pytest.raises(HookError, match="no such tool"):
        running.train()


def test_tokens_that_are_too_old_are_not_trained(stream: Make) -> None:
    running = stream("async", custom_generate_function_path=f"{HOOKS}:stale")
    with pytest.raises(HookError, match=r"--max-staleness 2: sample \d+ has a token of version 0, and version 3 would"):
        running.steps(8)


def test_the_end_of_the_rollouts_is_told(stream: Make) -> None:
    running = stream("async", num_rollout=2)
    running.train()
    running.train()
    with pytest.raises(ValueError, match="nothing left to train"):
        running.train()


@pytest.mark.parametrize("pipeline", ["stream", "async", "async-partial"])
def test_a_run_that_was_killed_goes_on_with_every_prompt(stream: Make, tmp_path: Path, pipeline: str) -> None:
    """What was under way or ready at the kill is generated again, before anything else."""
    first = stream(pipeline)
    trained = [label for _ in range(4) for label in labels(first.train())]
    asyncio.run(first.buffer.save(str(tmp_path / "buffer.json"), 3))
    first.train()  # of which no checkpoint tells
    first.stop()
    second = stream(pipeline, resume=tmp_path / "buffer.json")
    assert second.step == 4
    trained += [label for _ in range(4) for label in labels(second.train())]
    assert sorted(trained) == list(range(32))
