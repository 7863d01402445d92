"""Samples that are under way, in words, for a person who looks at a run that stands still. The clock is told."""

from __future__ import annotations

import asyncio

import pytest

from fusionrl.data.sample import Sample
from fusionrl.rollout.in_flight import GENERATED, SCORED, UnderWay


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _sample(index: int | None, length: int = 0) -> Sample:
    return Sample(index=index, prompt="p", tokens=[1] * (length + 1), response_length=length)


def test_nothing_is_under_way() -> None:
    assert UnderWay().told() == ""


def test_the_oldest_of_each_stage_is_named() -> None:
    clock = Clock()
    under_way = UnderWay(clock)
    with under_way.being(GENERATED, _sample(3)):
        clock.now = 20.0
        with under_way.being(GENERATED, _sample(7)), under_way.being(SCORED, _sample(None)):
            clock.now = 60.0
            assert under_way.told() == (
                "2 samples are being generated (sample 3 for 60 s), 1 sample is being scored (one for 40 s);"
                " 0 are finished since the start, with 0 tokens"
            )
        under_way.scored(_sample(7, 5))
        assert under_way.told() == (
            "1 sample is being generated (sample 3 for 60 s); 1 are finished since the start, with 5 tokens"
        )
    assert under_way.told() == ""


def test_a_sample_that_fails_or_is_cancelled_is_not_under_way() -> None:
    under_way = UnderWay()
    with pytest.raises(KeyError), under_way.being(SCORED, _sample(1)):
        raise KeyError

    async def cancelled() -> None:
        async def forever() -> None:
            with under_way.being(GENERATED, _sample(1)):
                await asyncio.sleep(60)

        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        assert under_way.told().startswith("1 sample is being generated")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    assert under_way.told() == ""
