"""The numbers of a stream at work, against its samples."""

from __future__ import annotations

import asyncio

import pytest

from tests.buffer import test_stream
from tests.buffer.test_stream import HOOKS, Make, Streaming

stream = test_stream.stream  # the fixture
LENGTH, PROMPT, GROUP, BATCH = 4, 3, 2, 4  # tokens of a response and a prompt, samples of a group, groups of a batch


def numbers(running: Streaming) -> dict[str, float]:
    return asyncio.run(running.buffer.metrics())


@pytest.mark.parametrize("in_flight", ["retract", "in_place"])
def test_tokens_of_samples_that_a_push_found_under_way(stream: Make, in_flight: str) -> None:
    running, mixed, prefilled, generated = stream("async-partial", in_flight=in_flight), 0, 0.0, 0.0
    for _ in range(8):
        mixed += sum(len(set(row["weight_versions"])) == 2 for row in running.train())
        found = numbers(running)
        prefilled += found["pipeline/tokens_prefilled_again"]
        generated += found["pipeline/tokens_generated"]
        assert found["pipeline/tokens_trained"] == BATCH * GROUP * LENGTH and found["pipeline/tokens_dropped"] == 0
        assert found["pipeline/length_trained_by_offered"] == 1.0
        assert 0 <= found["pipeline/credits_used"] <= found["pipeline/credits"] <= (2.5 + 1) * BATCH
        assert found["pipeline/parked"] == 0 and 0 <= found["perf/engines_idle"] <= 1
        waited = found["perf/time_wait_batch_s"] + found["perf/time_wait_deadline_s"]
        assert waited <= found["perf/time_wait_rollout_s"]
    assert generated >= 8 * BATCH * GROUP * LENGTH and mixed
    # What the push found: the prompt, and the half of the answer that was there.
    own = PROMPT + LENGTH // 2
    assert prefilled >= mixed * own and prefilled % own == 0 if in_flight == "retract" else prefilled == 0


def test_tokens_of_groups_that_a_filter_drops(stream: Make) -> None:
    running = stream("async", dynamic_sampling_filter_path=f"{HOOKS}:odd_prompts", num_rollout=4)
    total = 0.0
    for _ in range(4):
        running.train()
        found = numbers(running)
        dropped = sum(value for name, value in found.items() if name.startswith("rollout/dropped_"))
        assert found["pipeline/tokens_dropped"] == dropped * GROUP * LENGTH
        total += dropped
    assert total


def test_what_is_waited_for_is_timed(stream: Make) -> None:
    """Every fifth prompt takes 0.3 s, and training none: trainers wait for batches, or for groups that are due."""
    running, waited = stream("async", admission_lead=0.5), 0.0
    for _ in range(8):
        running.train()
        found = numbers(running)
        waited += found["perf/time_wait_batch_s"] + found["perf/time_wait_deadline_s"]
    assert waited > 0.25
