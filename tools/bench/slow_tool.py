"""A tool whose latency has a long tail: --custom-generate-function-path of the pipelines' benchmark.

Half of the calls take less than 0.5 s, one in a hundred over 8 s; after 10 s the tool gives up. A sample's latency
depends on its prompt's place in the data and its own in the group, so every pipeline waits equally long.
"""

import asyncio
import math
import random
from argparse import Namespace
from typing import Any

from fusionrl.plugin_api import Sample, generate

MEDIAN_S = 0.5
P99_S = 8.0
LIMIT_S = 10.0
_SIGMA = math.log(P99_S / MEDIAN_S) / 2.3263  # the normal distribution's 99th percentile


def latency_s(index: int) -> float:
    """Return the seconds that the tool takes for sample `index`."""
    return min(LIMIT_S, random.Random(index).lognormvariate(math.log(MEDIAN_S), _SIGMA))


async def answer(args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Generate, then wait for the tool; an evaluation has no tool."""
    sample = await generate(args, sample, sampling_params)
    if not evaluation:
        await asyncio.sleep(latency_s(int(sample.index)))
    return sample
