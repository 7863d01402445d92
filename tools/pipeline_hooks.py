"""Functions that the runs of tools/pipeline_matrix.py plug in: a reward, and a tool that takes its time."""

import asyncio
import random
from argparse import Namespace
from typing import Any

from fusionrl.plugin_api import Sample, function_schema

TOOL = "count"


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return the share of digits in the answer, which a random model has some of."""
    return sum(char.isdigit() for char in sample.response) / max(1, len(sample.response))


class Counter:
    """A tool that answers late, and each time with another number: turns and tokens of a tool lie over pushes."""

    schema = function_schema(TOOL, "Count up by one.")

    def __init__(self) -> None:
        self.number = 0

    async def __call__(self) -> str:
        await asyncio.sleep(random.uniform(0.1, 0.6))
        self.number += 1
        return f"count={self.number}"


def tools(args: Namespace, sample: Sample) -> list[Counter]:
    """For --tools-path."""
    return [Counter()]
