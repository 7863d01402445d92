"""tools/bench/engine_model.py and lengths.py: when modelled tokens come."""

from dataclasses import replace

import pytest

from tools.bench.engine_model import Machine, PacedBatch, Request

# A token a second whatever runs, and a second for 100 tokens of a prompt.
STEADY = Machine(gpus=1, parameters=1.0, bytes_per_weight=0.0, kv_bytes=0.0, flops=200.0, flops_share=1.0, overhead_s=1)


TOKEN_S = STEADY.token_s(1, 0)


def batch_of(*requests: Request, max_running: int | None = None) -> PacedBatch:
    """A batch of a steady machine that these requests have joined."""
    batch = PacedBatch(STEADY if max_running is None else replace(STEADY, max_running=max_running))
    for request in requests:
        batch.join(request)
    return batch


def test_a_request_ends_after_its_prompt_and_its_tokens() -> None:
    request = Request(num_prompt=100, num_tokens=10)
    batch = batch_of(request)
    due = 1 + 10 * TOKEN_S
    assert batch.next_end() == pytest.approx(due)
    assert batch.advance(due - 0.5) == [] and 9 < batch.tokens_of(request) < 10
    assert batch.advance(due + 5) == [request] and batch.tokens_of(request) == 10
    assert batch.busy_s == pytest.approx(due) and batch.now == due + 5 and batch.num_sampled == pytest.approx(10)


def test_a_growing_cache_makes_tokens_slower() -> None:
    """The end is that of the sum over all tokens, one by one."""
    machine = Machine(gpus=1)
    batch = PacedBatch(machine)
    request = Request(num_prompt=256, num_tokens=20_000)
    batch.join(request)
    by_token = machine.prefill_s(256) + sum(machine.token_s(1, 256 + n) for n in range(20_000))
    assert batch.advance(by_token * 0.999) == []
    assert batch.advance(by_token * 1.001) == [request]


def test_retract_computes_the_cache_again_and_in_place_does_not() -> None:
    ends = {}
    for mode in ("retract", "in_place"):
        request = Request(num_prompt=100, num_tokens=10)
        batch = batch_of(request)
        batch.advance(1 + 5 * TOKEN_S)
        assert batch.pause(mode) == [] and batch.next_end() is None
        assert batch.advance(50) == [] and batch.tokens_of(request) == pytest.approx(5)
        batch.set_version("1")
        batch.resume()
        ends[mode] = batch.next_end()
        assert batch.advance(100) == [request] and request.done == 10
        assert batch.spans_of(request) == [("0", pytest.approx(5)), ("1", 10)]
        assert batch.num_prefilled_again == pytest.approx(105 if mode == "retract" else 0)
    assert ends["in_place"] == pytest.approx(50 + 5 * TOKEN_S)
    assert ends["retract"] == pytest.approx(ends["in_place"] + 1.05)


def test_abort_ends_all_as_they_are_and_who_leaves_makes_room() -> None:
    requests = [Request(0, 10), Request(0, 10)]
    batch = batch_of(*requests, max_running=1)
    batch.advance(5 * TOKEN_S)
    assert batch.pause("abort") == requests and all(request.aborted for request in requests)
    assert [batch.tokens_of(request) for request in requests] == [pytest.approx(5), 0]
    first, second, third = requests = [Request(0, 10) for _ in range(3)]
    batch = batch_of(*requests, max_running=1)
    batch.leave(second)
    batch.leave(first)
    assert batch.running == {third} and not batch.waiting and batch.advance(100) == [third]
