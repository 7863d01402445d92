"""Rewards in this process (--in-process): the same values and messages as from a process of the pool."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

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
def score(tmp_path: Path) -> Any:
    """score(function, whether in this process, flag=value) -> (its reward, the sample)."""
    (tmp_path / "mine.py").write_text(FILE)

    def call(name: str | None, in_process: bool, rm_type: str | None = None, group_rm: bool = False) -> Any:
        path = None if name is None else f"{tmp_path}/mine.py:{name}"
        values = {"rm_type": rm_type, "custom_rm_path": path, "group_rm": group_rm, "in_process": in_process}
        args, sample = Namespace(reward_timeout_s=30, bonus=1, **values), Sample(index=7, response="four", label="four")
        return asyncio.run(batched_async_rm(args, [sample] * 2) if group_rm else async_rm(args, sample)), sample

    return call


def test_the_function_runs_in_this_process(score: Any) -> None:
    for name, in_process in (("plain", True), ("later", True), ("plain", False)):
        reward, sample = score(name, in_process)
        assert reward == 5.0 and (sample.metadata["pid"] == os.getpid()) == in_process
    assert score(None, True, rm_type="exact")[0] == 1.0
    assert score("group", True, group_rm=True)[0] == [0.0, 1.0]


def test_what_it_raises_is_told_the_same_way(score: Any) -> None:
    errors = []
    for in_process in (False, True):
        with pytest.raises(RewardError) as caught:
            score("broken", in_process)
        errors.append(caught.value)
        assert caught.value.samples[0].index == 7
    assert str(errors[0]) == str(errors[1]) and "KeyError: 'level' at sample 7" in str(errors[0])
    assert isinstance(errors[1].__cause__.__cause__, KeyError), "where --pdb opens"  # type: ignore[union-attr]
