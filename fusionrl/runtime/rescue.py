"""The end of a run after an error: the trained steps are recorded and saved, if the trainers are still consistent."""

from __future__ import annotations

import logging
from contextlib import suppress

from fusionrl.runtime.ray_cluster import FAILURES, root_cause
from fusionrl.runtime.run_context import Run

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0  # for every trainer to finish its current call


def rescue(run: Run) -> None:
    """Record and save the trained steps. Raises nothing: the error that ended the run must stay visible.

    A step whose training was finished counts, although the error kept it from its end.
    """
    try:
        if run.unrecorded is not None:
            run.reporter.record(*run.unrecorded)
    except Exception as error:  # of a full disk, or the one that ended the run: a metric that is a list
        logger.warning("the metrics of step %d could not be written: %s", run.last_trained + 1, error)
    if not run.saver.is_behind(run.last_trained):
        return
    try:
        run.reporter.print(f"the run failed; saving the trained steps (up to {run.last_trained + 1}) before it ends")
        _check_trainers(run)
        with suppress(*FAILURES):  # a dead engine has no memory to give
            run.make_room_for_trainers()
        run.end_early()
    except (Exception, KeyboardInterrupt) as error:  # any failure here would hide the first one
        reason = root_cause(error)
        logger.warning("the trained steps could not be saved: %s", str(reason) or type(reason).__name__)


def _check_trainers(run: Run) -> None:
    """Raise if a rank is dead, waits for another rank, or has learned a part of the next rollout."""
    try:
        ranks = run.actors.trainers.last_trained(_TIMEOUT_S)
    except TimeoutError:
        raise TimeoutError("the trainers wait for each other") from None
    if any(rollout_id is None or rollout_id > run.last_trained for rollout_id in ranks):
        raise RuntimeError(f"the error interrupted the training of step {run.last_trained + 2}")
