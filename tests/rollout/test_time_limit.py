"""--sample-timeout, whatever the function does when it is ended."""

import asyncio
from typing import Any

import numpy as np
import pytest

from fusionrl.data.sample import Sample
from fusionrl.rollout import generate_state
from fusionrl.rollout.generate_state import TIMED_OUT, within


async def misbehave(sample: Sample, kind: str) -> Sample:
    """Hang, and do what `kind` says when it is ended."""
    sample.response, sample.metadata["half"] = "a part", True
    for _ in range(20 if kind == "never ends" else 1):
        try:
            await asyncio.sleep(0.05 if kind == "never ends" else 60)
        except asyncio.CancelledError as error:
            if kind == "is ended":
                raise
            if kind == "raises something else":
                raise KeyError("mine") from error
    sample.status = Sample.Status.COMPLETED
    return sample


@pytest.mark.parametrize("kind", ["is ended", "returns all the same", "raises something else", "never ends"])
def test_it_fails_as_it_was_before(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generate_state, "_GRACE_S", 0.2)
    sample = Sample(index=7, prompt="p", prompt_tokens=np.array([1, 2]), metadata={"row": 1})

    async def make() -> Any:
        made = await within(0.1, sample, misbehave(sample, kind))
        await asyncio.sleep(0.1)  # what goes on all the same writes to another sample
        return made

    made = asyncio.run(make())
    assert (made.status, made.index, made.response) == (Sample.Status.FAILED, 7, "")
    assert made.metadata == {"row": 1, TIMED_OUT: 0.1} and made.num_tokens == 2
    assert "sample 7 is not finished" in caplog.text
    assert ("left to itself" in caplog.text) == (kind == "never ends")


def test_in_time_nothing_changes() -> None:
    async def made(sample: Sample) -> Sample:
        sample.status = Sample.Status.COMPLETED
        return sample

    async def fails(sample: Sample) -> Sample:
        raise TimeoutError("the tool's own")

    sample = Sample(index=7)
    assert asyncio.run(within(5.0, sample, made(sample))) is sample
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
