"""Rewards in this process (--in-process): the same values and messages as from a process of the pool."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from pathlib import Path

import pytest

from fusionrl.data.sample import Sample
from fusionrl.rewards.dispatch import RewardError, async_rm, batched_async_rm

FILE = """
import os
def plain(args, sample, **kw):
    sample.metadata["pid"] = os.getpid()
    return len(sample.response) + args.bonus
async def later(args, sample, **kw):
    return plain(args, sample)
def group(args, samples, **kw):
    return [float(i) for i, _ in enumerate(samples)]
def broken(args, sample, **kw):
    return sample.metadata["level"]
"""


@pytest.fixture
def score(tmp_path: Path):  # type: ignore[no-untyped-def]
    (tmp_path / "mine.py").write_text(FILE)

    def path_of(name: str) -> str:
        return f"{tmp_path}/mine.py:{name}"

    def call(name: str | None, in_process: bool, **more: object) -> tuple[object, Sample]:
        path = None if name is None else path_of(name)
        args = Namespace(rm_type=None, custom_rm_path=path, reward_timeout_s=30, bonus=1, in_process=in_process)
        vars(args).update(more)
        sample = Sample(index=7, response="four", label="four")
        return asyncio.run(async_rm(args, sample)), sample

    call.path = path_of  # type: ignore[attr-defined]
    return call


def test_the_function_runs_in_this_process(score) -> None:  # type: ignore[no-untyped-def]
    for name in ("plain", "later"):
        reward, sample = score(name, True)
        assert reward == 5.0 and sample.metadata["pid"] == os.getpid()
    reward, sample = score("plain", False)
    assert reward == 5.0 and sample.metadata["pid"] != os.getpid()
    assert score(None, True, rm_type="exact")[0] == 1.0
    args = Namespace(rm_type=None, custom_rm_path=score.path("group"), reward_timeout_s=30, group_rm=True)
    args.in_process = True
    assert asyncio.run(batched_async_rm(args, [Sample(index=1), Sample(index=2)])) == [0.0, 1.0]


def test_what_it_raises_is_told_the_same_way(score) -> None:  # type: ignore[no-untyped-def]
    errors = []
    for in_process in (False, True):
        with pytest.raises(RewardError) as caught:
            score("broken", in_process)
        errors.append(caught.value)
        assert caught.value.samples[0].index == 7
    assert str(errors[0]) == str(errors[1]) and "KeyError: 'level' at sample 7" in str(errors[0])
    assert isinstance(errors[1].__cause__.__cause__, KeyError), "where --pdb opens"  # type: ignore[union-attr]
