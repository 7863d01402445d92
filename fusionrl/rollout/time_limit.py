"""--sample-timeout: a sample whose function hangs fails, and the rollout goes on."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable

from fusionrl.data.sample import Sample

logger = logging.getLogger(__name__)

TIMED_OUT = "timed_out"  # in the metadata of a sample: the time limit that it passed, in seconds


async def within(
    limit_s: float | None, sample: Sample, making: Awaitable[Sample | list[Sample]]
) -> Sample | list[Sample]:
    """Return what `making` makes of a sample; after `limit_s` the sample as it was, FAILED, without an answer."""
    if limit_s is None:
        return await making
    before = copy.deepcopy(vars(sample))
    try:
        async with asyncio.timeout(limit_s) as limit:
            made = await making
        if not limit.expired():
            return made
    except TimeoutError:
        if not limit.expired():  # a function's own
            raise
    except Exception as error:
        if not limit.expired():
            raise
        logger.debug("sample %s raised when it was ended: %s", sample.index, error)  # the limit is the cause
    logger.warning("--sample-timeout %g: sample %s is not finished; it is not trained on", limit_s, sample.index)
    vars(sample).clear()
    vars(sample).update(before)
    if not sample.num_tokens and sample.prompt_tokens is not None:
        sample.tokens = sample.prompt_tokens
    sample.metadata = {**(sample.metadata or {}), TIMED_OUT: limit_s}
    sample.status = Sample.Status.FAILED
    return sample
