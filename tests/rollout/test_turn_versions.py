"""Answers of several weight versions, repeated piece by piece; the engine is a function of seed, place and version."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fusionrl.engines.client import Generation
from fusionrl.rollout.turn_versions import EngineVersions, GroupTurns, forbid_replay, noting_turns, turns_in_context

PROMPT = [1, 2, 3]


class Engine:
    """Samples a token a turn of the loop; `pushes`: number of sampled tokens → the version from then on."""

    def __init__(self, pushes: Mapping[int, int] | None = None, end: int = -1) -> None:
        self.version, self.num_sampled, self.pushes, self.end = 0, 0, dict(pushes or {}), end
        self.asked: list[tuple[int, int]] = []  # tokens of the prompt, tokens at most

    async def generate(self, payload: Mapping[str, Any], routing_key: str | None = None) -> Generation:
        prompt, params = payload["input_ids"], payload["sampling_params"]
        self.asked.append((len(prompt), params["max_new_tokens"]))
        assert params.get("min_new_tokens", 0) <= params["max_new_tokens"]
        tokens, versions = list[int](), list[int]()
        while len(tokens) < params["max_new_tokens"] and self.end not in tokens:
            await asyncio.sleep(0)
            self.version = self.pushes.pop(self.num_sampled, self.version)
            # Of the last token, too: an answer that continues another text is another one.
            last = (prompt + tokens)[-1]
            tokens.append((7 * params["sampling_seed"] + 31 * len(prompt + tokens) + 5 * self.version + last) % 101)
            versions.append(self.version)
            self.num_sampled += 1
        counts = [[version, 1] for version in versions]  # as the events of a stream have them
        return Generation(
            tokens=np.array(tokens, np.int32),
            log_probs=np.array(tokens, np.float32) / -101,
            text="".join(map(chr, tokens)),
            finish_reason="length",
            weight_versions=[(version, count) for version, count in counts],
            prompt_tokens=len(prompt),
            cached_tokens=0,
            meta_info={},
        )


def request(seed: int = 5, length: int = 12, **params: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"sampling_seed": seed, "max_new_tokens": length, **params}}


async def sampled(turns: GroupTurns, engine: Engine, *requests: dict[str, Any]) -> list[Generation]:
    client: Any = engine
    return await asyncio.gather(*(turns.generate(client, one) for one in requests))


def record_of(engine: Engine, *requests: dict[str, Any]) -> tuple[list[Generation], Any]:
    turns = EngineVersions(0, {}, lambda: None).of_group(3)
    answers = asyncio.run(sampled(turns, engine, *requests))
    return answers, turns.to_record()


async def replayed(record: Any, engine: Engine, *requests: dict[str, Any]) -> tuple[list[Generation], Any]:
    """Answers and record of a replay in which a push comes as soon as it may."""
    ends: list[int] = []
    versions = EngineVersions(0, {3: record}, lambda: ends.append(engine.version))
    turns = versions.of_group(3)
    made = asyncio.create_task(sampled(turns, engine, *requests))
    while not made.done():
        if not versions.are_needed():
            engine.version += 1
            versions.push(engine.version)
        await asyncio.sleep(0)
    answers = await made
    assert ends == sorted(ends) and len(ends) == sum(len(runs) for _, runs in record)
    return answers, turns.to_record()


def same(one: Generation, other: Generation) -> bool:
    arrays = ((one.tokens, other.tokens), (one.log_probs, other.log_probs))
    rest = [(answer.text, answer.prompt_tokens, answer.finish_reason) for answer in (one, other)]
    return all(np.array_equal(a, b) for a, b in arrays) and rest[0] == rest[1]


def test_answers_over_pushes_are_sampled_again() -> None:
    """Of three turns one is over before the pushes, one spans three versions, and one begins after them."""
    first, record = record_of(Engine({6: 1, 14: 2}), request(5, 2), request(6, 10), request(7, 8))
    assert record == [[5, [[0, 2]]], [6, [[0, 2], [1, 4], [2, 4]]], [7, [[0, 2], [1, 4], [2, 2]]]]
    engine = Engine()
    again, same_record = asyncio.run(replayed(record, engine, request(5, 2), request(6, 10), request(7, 8)))
    assert same_record == record and all(map(same, first, again))
    assert sorted(engine.asked)[:3] == [(3, 2)] * 3 and max(engine.asked) == (9, 4)
    assert [answer.part for answer in again] == [1, 3, 3]  # whose text is made of all its tokens


def test_a_turn_that_began_after_a_push_waits_for_it() -> None:
    first, record = record_of(Engine({0: 2}), request())
    assert record == [[5, [[2, 12]]]]
    again, _ = asyncio.run(replayed(record, Engine(), request(min_new_tokens=4)))
    assert same(first[0], again[0])


def test_the_least_length_fits_each_piece() -> None:
    _, record = record_of(Engine({5: 1}), request(min_new_tokens=8))
    asyncio.run(replayed(record, Engine(), request(min_new_tokens=8)))


def test_a_group_without_a_record_is_free() -> None:
    versions = EngineVersions(0, {3: [[5, [[0, 12]]]]}, lambda: None)
    turns = versions.of_group(4)
    asyncio.run(sampled(turns, Engine({5: 1}), request()))
    assert turns.to_record() == [[5, [[0, 5], [1, 7]]]] and versions.are_needed()


def test_a_run_that_leaves_the_record_ends() -> None:
    def fails(record: Any, *requests: dict[str, Any], engine: Engine | None = None) -> str:
        with pytest.raises(ValueError, match="does not repeat the recorded one") as error:
            asyncio.run(replayed(record, engine or Engine(), *requests))
        return str(error.value)

    assert "has no turn with seed 9" in fails([[5, [[0, 12]]]], request(9))
    assert "[[0, 5], [1, 7]], of which number 2 is [[1, 6]]" in fails([[5, [[0, 5], [1, 7]]]], request(5, 11))
    ends_early = Engine(end=(7 * 5 + 31 * 3 + 3) % 101)  # its first token
    assert "of which number 1 is [[0, 1]]" in fails([[5, [[0, 5], [1, 7]]]], request(), engine=ends_early)
    turns = EngineVersions(0, {3: [[5, [[0, 12]]], [6, [[0, 12]]]]}, lambda: None).of_group(3)
    asyncio.run(sampled(turns, Engine(), request()))
    with pytest.raises(ValueError, match="the record has 1 more turns"):
        turns.to_record()


def test_what_cannot_be_repeated_is_noted() -> None:
    assert record_of(Engine({5: 1}), request(stop=["x"], frequency_penalty=0.5, stop_token_ids=[1]))[1] == (
        "a push came within an answer that depends as a whole on stop, frequency_penalty"
    )
    assert record_of(Engine(), request(stop=["x"]))[1] == [[5, [[0, 12]]]]
    assert record_of(Engine(), request(), request())[1] == "two turns had the same sampling_seed"
    turns = EngineVersions(0, {}, lambda: None).of_group(3)
    with noting_turns(turns):
        forbid_replay("post")
    forbid_replay("post")  # outside of a group nothing is noted
    assert turns_in_context() is None
    assert turns.to_record() == "engines were asked by post, not by generate_turn"


def test_a_turn_that_fails_or_is_cancelled_is_noted() -> None:
    turns = EngineVersions(0, {3: [[5, [[1, 12]]]]}, lambda: None).of_group(3)

    async def cancel() -> None:
        waiting = asyncio.create_task(sampled(turns, Engine(), request()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(cancel())
    turns._recorded = None
    assert turns.to_record() == "a turn had no answer"
