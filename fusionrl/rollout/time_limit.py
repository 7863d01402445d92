"""--sample-timeout: a sample whose function hangs fails, and the rollout continues."""

import asyncio
import copy
import logging
from collections.abc import Coroutine
from typing import Any

from fusionrl.data.sample import Sample

logger = logging.getLogger(__name__)

TIMED_OUT = "timed_out"  # in the metadata of a sample: the time limit that it passed, in seconds
_GRACE_S = 5.0  # for a function to end when it is cancelled


async def within(
    limit_s: float | None, sample: Sample, making: Coroutine[Any, Any, Sample | list[Sample]]
) -> Sample | list[Sample]:
    """Return what `making` makes of a sample; after `limit_s` another sample, as it was before, FAILED."""
    if limit_s is None:
        return await making
    blank = copy.deepcopy(sample)
    task = asyncio.ensure_future(making)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            return task.result()
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE_S)  # it still uses the client, which is closed after this
        raise
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=_GRACE_S)
    if done and not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("sample %s raised when it was ended: %s", sample.index, error)  # the limit is the cause
    more = "" if done else "; its function does not end, and is left to itself"
    logger.warning(
        "--sample-timeout %g: sample %s is not finished; it is not trained on%s", limit_s, sample.index, more
    )
    if not blank.num_tokens and blank.prompt_tokens is not None:
        blank.tokens = blank.prompt_tokens
    blank.metadata = {**(blank.metadata or {}), TIMED_OUT: limit_s}
    blank.status = Sample.Status.FAILED
    return blank
