"""The samples at which a user's function raised go to a file of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fusionrl.config.hooks import HookError, user_code
from fusionrl.data.sample import Sample
from fusionrl.observe.rollouts import RolloutWriter

logger = logging.getLogger(__name__)


@contextmanager
def writing_blamed(writer: RolloutWriter, rollout_id: int, attempt: int, kind: str) -> Iterator[None]:
    """Write the samples at which a user's function raised to a file of the run, and name it in the error."""
    try:
        yield
    except HookError as error:
        samples = [sample for sample in error.samples if isinstance(sample, Sample)]
        if samples:
            try:
                rows = (sample.to_row() | {"error": str(error)} for sample in samples)
                with user_code("attributes of the user's", None):
                    path = writer.write(rollout_id, attempt, rows, kind=kind)
            except HookError as failure:  # the user's own error goes first
                logger.warning("the samples at which a user's function raised cannot be written: %s", failure)
            else:
                count = f"the {len(samples)} samples" if len(samples) > 1 else "the sample"
                error.add(f"{count} that it was at: {path}")
        raise
