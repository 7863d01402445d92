"""--sample-timeout, whatever the function does when it is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fusionrl.data.sample import Sample
from fusionrl.rollout import time_limit
from fusionrl.rollout.time_limit import TIMED_OUT, within

Made = Coroutine[Any, Any, Sample | list[Sample]]


async def hangs(sample: Sample) -> Sample:
    sample.response, sample.metadata["half"] = "a part", True
    await asyncio.sleep(60)
    return sample


async def returns_all_the_same(sample: Sample) -> Sample:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        sample.status = Sample.Status.COMPLETED
    return sample


async def raises_something_else(sample: Sample) -> Sample:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as error:
        raise KeyError("mine") from error
    return sample


async def never_ends(sample: Sample) -> Sample:
    for _ in range(20):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    sample.status = Sample.Status.COMPLETED
    return sample


@pytest.mark.parametrize("function", [hangs, returns_all_the_same, raises_something_else, never_ends])
def test_it_fails_as_it_was_before(
    function: Callable[[Sample], Made], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(time_limit, "_GRACE_S", 0.2)
    sample = Sample(index=7, prompt="p", prompt_tokens=[1, 2], metadata={"row": 1})

    async def make() -> tuple[Sample, str]:
        made = await within(0.1, sample, function(sample))
        assert isinstance(made, Sample)
        found = str(made.status)
        await asyncio.sleep(0.1)  # what goes on all the same writes to another sample
        return made, found

    made, _ = asyncio.run(make())
    assert made.status == Sample.Status.FAILED and made.index == 7 and not made.response
    assert made.metadata == {"row": 1, TIMED_OUT: 0.1} and made.num_tokens == 2
    assert "sample 7 is not finished" in caplog.text
    assert ("left to itself" in caplog.text) == (function is never_ends)


def test_in_time_nothing_changes() -> None:
    async def made(sample: Sample) -> Sample:
        sample.status = Sample.Status.COMPLETED
        return sample

    async def fails(sample: Sample) -> Sample:
        raise TimeoutError("the tool's own")

    sample = Sample(index=7)
    assert asyncio.run(within(5.0, sample, made(sample))) is sample
    assert asyncio.run(within(None, sample, made(sample))) is sample
    with pytest.raises(TimeoutError, match="the tool's own"):
        asyncio.run(within(5.0, sample, fails(sample)))


def test_who_is_cancelled_ends_the_function_too() -> None:
    ended = []

    async def notes(sample: Sample) -> Sample:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)  # it says goodbye to its tool
            ended.append(sample.index)
        return sample

    async def run() -> None:
        task = asyncio.create_task(within(30.0, Sample(index=7), notes(Sample(index=7))))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ended == [7]

    asyncio.run(run())
